"""How long it takes to average gradients over hosts: hvdplus, Horovod and DDP in turn, in one run, without computing.

python benchmarks/exchange.py --only "hvdplus/mpi4py/onebit ddp/gloo/fp16" --gbit 1
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import exchange_report
import memory
import reporting
import targets
import typer
import wire
from contenders import chosen, group_of
from exchange_report import Rate, Trial
from fleet import Fleet, GroupError
from gradients import WORK, count
from hosts import Hosts, Loopback, supported
from memory import Memory
from protocol import Turn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PATIENCE_SECONDS = 180.0
RESULTS = Path("build/bench")
FROZEN_SECONDS = 36000  # waiting for one's turn must not count as waiting for a rank
DENSE_START = 3  # steps that DDP's PowerSGD hook needs before it compresses

console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    contenders: list[str]
    work: str
    hosts: int
    steps: int
    warmup: int
    rounds: int
    seconds: float

    def turn(self, contender: str, number: int) -> Turn:
        """Return a contender's turn in a round."""
        late = fnmatchcase(contender, "ddp/*/powersgd:*")
        warmup = self.warmup + (DENSE_START if late else 0)
        return Turn(contender, self.work, warmup, self.steps, self.seconds, first=1000 * number)

    def patience(self, gbit: float | None) -> float:
        """Return the seconds after which a turn has failed: many times what the slowest should take."""
        gigabits = 32e-9 * count(WORK[self.work]()) * self.hosts
        return PATIENCE_SECONDS + 4 * (self.steps + self.warmup + DENSE_START) * gigabits / (gbit or 1.0)


def measure(plan: Plan, fleet: Fleet, rate: Rate, progress: Progress) -> None:
    """Measure all contenders at one rate, in turn, every other round in the opposite order."""
    fleet.hosts.shape(rate.asked)
    rate.payload.append(wire.measure(fleet.hosts))
    rate.trials = {name: Trial() for name in plan.contenders}
    task = progress.add_task(rate.label, total=plan.rounds * len(plan.contenders))
    for number in range(plan.rounds):
        for name in plan.contenders[:: -1 if number % 2 else 1]:
            progress.update(task, description=f"{rate.label}  {name}")
            take_turn(plan, fleet, rate, name, number)
            progress.advance(task)
    progress.update(task, description=rate.label)
    rate.payload.append(wire.measure(fleet.hosts))


def take_turn(plan: Plan, fleet: Fleet, rate: Rate, name: str, number: int) -> None:
    """Let a contender take its turn; one that failed gets none any more."""
    trial = rate.trials[name]
    if trial.error:
        return
    try:
        ranks = fleet.ask(group_of(name), plan.turn(name, number), plan.patience(rate.asked))
        trial.add(ranks, fleet.hosts.sharing)
    except GroupError as error:
        trial.error = str(error)


def make_hosts(number: int) -> Hosts:
    """Return hosts that are not made yet, or the loopback where they cannot be, and say why."""
    reason = supported()
    if reason is None:
        return Hosts(number)
    console.print(f"No hosts of our own: {reason}. Measuring on the loopback interface, which nothing limits.")
    return Loopback(number)


def environment(ranks: int) -> dict[str, str]:
    """Return what all ranks get: a fair share of the cores, and this tree's packages unless PYTHONPATH names others."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    own = os.pathsep.join([str(reporting.ROOT), str(reporting.ROOT / "integrations")])
    path = os.environ.get("PYTHONPATH", own)
    frozen = str(FROZEN_SECONDS)
    return {
        "OMP_NUM_THREADS": str(threads),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": path,
        "HVDPLUS_TIMEOUT": frozen,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": frozen,
    }


def run(plan: Plan, gbits: Sequence[float | None], with_memory: bool) -> tuple[list[Rate], list[Memory]]:
    """Measure everything on hosts that are there for as long as it takes."""
    env = environment(plan.hosts)
    with make_hosts(plan.hosts) as hosts:
        rates = [Rate(None)] if isinstance(hosts, Loopback) else [Rate(gbit) for gbit in gbits]
        with Fleet(hosts, 1, env) as fleet, progress_line() as progress:
            for rate in rates:
                measure(plan, fleet, rate, progress)
        return rates, measure_memory(plan, hosts, env) if with_memory else []


def measure_memory(plan: Plan, hosts: Hosts, env: Mapping[str, str]) -> list[Memory]:
    """Measure the memory of those contenders for which that is of interest; one that fails is named and left out."""
    hosts.shape(None)
    found: list[Memory] = []
    with console.status("memory, each contender in new processes") as status:
        plain = memory.peak(memory.PLAIN, hosts, 1, plan.work, env)
        for name in filter(plan.contenders.__contains__, memory.CONTENDERS):
            status.update(f"memory: {name}")
            try:
                found += memory.measure(name, plain, hosts, plan.work, env)
            except GroupError as error:
                console.print(str(error), style="red", markup=False, highlight=False)
    return found


def progress_line() -> Progress:
    """Return what shows how far it is."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def report(plan: Plan, rates: Sequence[Rate], memories: Sequence[Memory], out: Path, took: float) -> None:
    """Print tables, and write them, JSON and plots."""
    machine, page = reporting.machine(), reporting.Report(console)
    verdicts: list[targets.Verdict] = []
    for rate in rates:
        exchange_report.failures(rate, console)
        if rate.medians():
            page.say(exchange_report.times(rate, plan.work))
            exchange_report.draw(rate, plan.work, out / f"{stem(plan, rate)}.png", reporting.in_words(machine))
        if (plan.work, plan.hosts, rate.asked) == (targets.WORK, targets.HOSTS, targets.GBIT):
            verdicts = targets.verdicts(rate.medians(), list(rate.trials))
    if memories:
        page.say(exchange_report.memories(memories))
    if verdicts:
        page.say(exchange_report.judged(verdicts))
    page.say(f"{plan.hosts} hosts on one machine: {reporting.in_words(machine)}; {took / 60:.1f} minutes.")
    path = out / f"exchange-{plan.work}-{plan.hosts}hosts.json"
    page.write(path.with_suffix(".txt"))
    about = {"benchmark": "exchange", "machine": machine, "versions": reporting.versions(), "seconds": took}
    found = {
        "rates": [asdict(rate) for rate in rates],
        "memory": [asdict(one) for one in memories],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    reporting.write_json(path, {**about, "plan": asdict(plan), **found})
    console.print(f"Written to {path}, the tables beside it as text.")


def parse_rate(text: str) -> float | None:
    """Return a rate in Gbit/s, or None for one that is not limited.

    Raises:
        ValueError: it is neither a positive number nor `none`.
    """
    if text == "none":
        return None
    if not (text.replace(".", "", 1).isdigit() and float(text) > 0):
        raise ValueError(f"gbit has {text!r}; a rate is a number above 0, in Gbit/s, or none")
    return float(text)


def stem(plan: Plan, rate: Rate) -> str:
    """Return the name of a rate's plot, without its ending."""
    speed = "unlimited" if rate.asked is None else f"{rate.asked:g}gbit"
    return f"exchange-{plan.work}-{plan.hosts}hosts-{speed}"


def main(
    hosts: Annotated[int, typer.Option(min=2, max=4, help="How many hosts, with one rank each.")] = 2,
    gbit: Annotated[str, typer.Option(help="Rates of the links in Gbit/s, with commas; `none` does not limit.")] = "1",
    work: Annotated[str, typer.Option(help=f"Whose gradients: {', '.join(WORK)}.")] = "resnet50",
    only: Annotated[str, typer.Option(help="Contenders or globs of them, with blanks between.")] = "*",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a contender in a round.")] = 4,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them that are not timed.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="How often all contenders take their turn.")] = 3,
    seconds: Annotated[float, typer.Option(help="No further step of a turn begins after these.")] = 6.0,
    out: Annotated[Path, typer.Option(help="Where tables, JSON and plots go.")] = RESULTS,
    with_memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure memory, too.")] = True,
    quick: Annotated[bool, typer.Option(help="One round of two steps, and no memory: does everything work?")] = False,
) -> None:
    """Average a network's gradients over hosts with every contender in turn, and say how long each took."""
    try:
        names, gbits = chosen(only), [parse_rate(text) for text in gbit.split(",")]
        if work not in WORK:
            raise ValueError(f"work is {work!r}; there are {', '.join(WORK)}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if quick:
        steps, warmup, rounds, with_memory = 2, 1, 1, False
    plan = Plan(names, work, hosts, steps, warmup, rounds, seconds)
    begin = time.monotonic()
    rates, memories = run(plan, gbits, with_memory)
    report(plan, rates, memories, out, time.monotonic() - begin)
    if any(trial.error for rate in rates for trial in rate.trials.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
