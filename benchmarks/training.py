"""Real training over a slow link: how much sooner a GPT is as good as with Horovod's fp16, codec by codec.

sudo python benchmarks/training.py --out build/training --gbit 0.1

Two hosts of one machine (`benchmarks/hosts.py`), one rank on each; the same weights, batches, steps and launcher for
all. With `@STEPS` behind its name a codec that loses something is given more steps, which can still be fewer seconds;
with `no-momentum` AdamW has none once the codec is in force.
What is in OUT already, with the same settings, is not trained again. Horovod as it comes is `benchmarks/stock_gpt.py`,
hvdplus is `examples/torch_gpt.py`. Seconds are those of training, without evaluations and start. OUT gets the logs,
`training.json`, `training.txt` and `training.png`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import reporting
from hosts import INTERFACE, Host, Hosts, HostsError, supported
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
STOCK = ("horovod none", "horovod fp16")
OURS = ("exact", "fp16", "int8", "int4", "ternary", "onebit", "topk:0.01 no-momentum", "powersgd:4")
MEASURE = "horovod fp16"  # what all are compared with
NO_MOMENTUM = "no-momentum"
ONLY = f"who trains ({', '.join(STOCK + OURS)}), such as 'topk:0.01 {NO_MOMENTUM}@200' for 200 steps"
TIMEOUT = 1800.0  # seconds for one training

Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results, made if it is not there")
    parser.add_argument("--gbit", type=float, default=0.1, help="rate of the hosts' links, Gbit/s (%(default)s)")
    parser.add_argument("--only", nargs="+", default=STOCK + OURS, help=ONLY)
    parser.add_argument("--launcher", choices=["mpirun", "horovodrun"], default="mpirun", help="(%(default)s)")
    parser.add_argument("--engine", choices=["horovod", "mpi"], default="horovod", help="hvdplus' own (%(default)s)")
    parser.add_argument("--fields", default="", help="fields of the strategy for all codecs, such as warmup_steps=10")
    parser.add_argument("--within", type=float, default=1.0, help="percent above the loss to reach (%(default)s)")
    parser.add_argument("--size", default="3m", help="millions of parameters (%(default)s)")
    parser.add_argument("--context", type=int, default=64, help="bytes in a sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences in both ranks' batches together (%(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    return parser.parse_args()


# -- training


def program(name: str, args: argparse.Namespace, log: Path) -> list[str]:
    """Return the command line of one rank."""
    described, _, steps = name.partition("@")
    strategy, _, how_else = described.partition(" ")
    if strategy == "horovod":
        how = [str(HERE / "stock_gpt.py"), "--compression", how_else]
    else:
        strategy = ",".join(filter(None, (strategy, args.fields)))
        how = [str(HERE.parent / "examples" / "torch_gpt.py"), "--strategy", strategy]
        how += ["--momentum", "0"] if how_else == NO_MOMENTUM else []
    names = ("size", "context", "batch", "lr", "seed")
    options = [part for option in names for part in (f"--{option}", str(getattr(args, option)))]
    options += ["--steps", steps or str(args.steps)]
    often = ["--evaluate", str(max(1, args.steps // 20)), "--warmup", str(max(1, args.steps // 10))]
    return [sys.executable, *how, *options, *often, "--diary", str(log)]


def trained(name: str, hosts: Hosts, args: argparse.Namespace) -> Row:
    """Train one contender; its curve, and the bytes that left the first host, from start to end.

    Raises:
        HostsError: the training failed; the message has the end of what it said.
    """
    log = args.out / f"{re.sub(r'[^a-z0-9.]+', '-', name)}.jsonl"
    environ = {"OMP_NUM_THREADS": "1", "HVDPLUS_ENGINE": args.engine}
    line, first = program(name, args, log.absolute()), hosts[0]
    if args.launcher == "mpirun":
        line = hosts.mpirun(line, forward=[*environ, *(["PYTHONPATH"] if "PYTHONPATH" in os.environ else [])])
    else:
        line = hosts.horovodrun(line)
    before = sent_by(hosts, first)
    ended = hosts.run(first, line, environ, timeout=TIMEOUT)
    if ended.returncode:
        raise HostsError(f"{name} ended with {ended.returncode}: {ended.stdout[-2000:]}")
    curve = [json.loads(text) for text in log.read_text().splitlines()]
    about = {"machine": reporting.in_words(reporting.machine()), "commit": reporting.versions()["commit"]}
    return {"name": name, "curve": curve, "wire_bytes": sent_by(hosts, first) - before, **about}


def sent_by(hosts: Hosts, host: Host) -> int:
    """Return how many bytes have left a host, frames and all."""
    counter = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
    return int(hosts.run(host, ["cat", counter], timeout=20).stdout)


# -- what came of it


def reached(curve: Sequence[Row], loss: float) -> float | None:
    """Return after how many seconds of training ``loss`` was reached, on straight lines between evaluations.

    Example:
        >>> reached([{"seconds": 0, "loss": 4.0}, {"seconds": 10, "loss": 2.0}], 3.0)
        5.0
    """
    for before, after in itertools.pairwise(curve):
        if after["loss"] <= loss < before["loss"]:
            share = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return float(before["seconds"] + share * (after["seconds"] - before["seconds"]))
    return None


def compared(runs: list[Row], within: float) -> list[Row]:
    """Add to every run how it ended and how much sooner it got there, where the run to compare with is there."""
    measure = next((run for run in runs if run["name"] == MEASURE), None)
    return [run | _summary(run["curve"], measure["curve"] if measure else None, within) for run in runs]


def _summary(curve: list[Row], measure: list[Row] | None, within: float) -> Row:
    last = curve[-1]
    summary: Row = {"seconds_a_step": last["seconds"] / last["step"], "loss": last["loss"]}
    if measure is None:
        return summary
    goal = measure[-1]["loss"]
    summary["above_percent"] = 100 * (last["loss"] / goal - 1)
    for name, loss in (("same", goal), ("near", goal * (1 + within / 100))):
        mine, theirs = reached(curve, loss), reached(measure, loss)
        summary[f"{name}_seconds"] = mine
        summary[f"{name}_ratio"] = theirs / mine if mine and theirs else None
    return summary


def settings(args: argparse.Namespace) -> Row:
    """Return what runs must have in common to be compared."""
    return {key: value for key, value in vars(args).items() if key not in ("out", "only", "within")}


def earlier(args: argparse.Namespace) -> dict[str, Row]:
    """Return the runs that are in OUT already, with the same settings: what was stopped goes on where it was."""
    file = args.out / "training.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    return {run["name"]: run for run in found.get("runs", [])} if found.get("settings") == settings(args) else {}


def keep(rows: list[Row], args: argparse.Namespace) -> None:
    """Write all runs into OUT."""
    (args.out / "training.json").write_text(json.dumps({"settings": settings(args), "runs": rows}, indent=1))


def show(rows: list[Row], args: argparse.Namespace) -> None:
    """Print the table, and write it."""
    near = f"{args.within:g} %"
    table = Table(
        "", "MB sent", "s a step", "loss", "% above", "s to it", "sooner", f"s to {near}", "sooner",
        title=f"{args.steps} steps over {args.gbit:g} Gbit/s; seconds to the loss of {MEASURE}, and to {near} above it",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["name"], f"{row['wire_bytes'] / 1e6:,.0f}", f"{row['seconds_a_step']:.3f}",
            f"{row['loss']:.4f}", _text(row, "above_percent", "+.2f"),
            _text(row, "same_seconds", ".1f"), _text(row, "same_ratio", ".2f"),
            _text(row, "near_seconds", ".1f"), _text(row, "near_ratio", ".2f"),
        )  # fmt: skip
    page = reporting.Report(Console(width=110))
    page.say(table)
    page.say(f"Two hosts on one machine: {'; '.join(dict.fromkeys(row['machine'] for row in rows))}.")
    page.write(args.out / "training.txt")


def _text(row: Row, key: str, form: str) -> str:
    """Format a number, which is missing where a loss was never reached."""
    return "-" if row.get(key) is None else format(row[key], form)


def plot(rows: list[Row], args: argparse.Namespace) -> None:
    """Draw loss against seconds."""
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    for row in rows:
        points = [(entry["seconds"], entry["loss"]) for entry in row["curve"]]
        axes.plot(*zip(*points, strict=True), label=row["name"], linestyle="--" if row["name"] in STOCK else "-")
    axes.set(xlabel="seconds of training", ylabel="validation loss, nats a byte", title=f"{args.gbit:g} Gbit/s")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(args.out / "training.png", dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Train all, one after the other on the same hosts, and compare."""
    args = arguments()
    if (reason := supported()) is not None:
        print(f"hosts cannot be made here: {reason}", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    runs = earlier(args)
    with Hosts(2, gbit=args.gbit) as hosts:
        for name in args.only:
            if name not in runs:
                print(f"{name} ...", flush=True)
                runs[name] = trained(name, hosts, args)
                keep(compared(list(runs.values()), args.within), args)
    rows = compared(list(runs.values()), args.within)
    keep(rows, args)
    show(rows, args)
    plot(rows, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
