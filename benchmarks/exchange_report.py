"""What the exchange benchmark found, as a table, as JSON, as a plot, and against what must be reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import reporting
import targets
from gradients import WORK, count
from memory import Memory
from protocol import Measured
from reporting import Summary
from rich.console import Console
from rich.table import Table

COLUMNS = ("contender", "ms", "min", "x hvd fp16", "x DDP fp16", "MB sent", "bound", "% of bound")


@dataclass
class Trial:
    """All that was measured of one contender at one rate.

    Args:
        rounds: seconds of every step, by round.
        sent: bytes a step that left a host, by round.
        own: what the contender counted itself in the last round.
        error: why it failed, if it did.
    """

    rounds: list[list[float]] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def add(self, ranks: Sequence[Measured], sharing: int = 1) -> None:
        """Take in a round: a step takes as long as its slowest rank; with different means or none nobody has exchanged.

        Args:
            ranks: what each rank measured.
            sharing: how many ranks sent by the interface that each of them looked at.
        """
        if any(rank.sample != ranks[0].sample for rank in ranks):
            self.error = f"the ranks' means differ: {[rank.sample for rank in ranks]}"
            return
        if not ranks[0].sample[-1] > 0:
            self.error = f"the ranks' means are all zero, or no numbers: {ranks[0].sample}"
            return
        steps = [max(step) for step in zip(*(rank.seconds for rank in ranks), strict=True)]
        self.rounds.append(steps)
        self.sent.append(max(rank.sent for rank in ranks) / sharing / len(steps))
        self.own = ranks[0].own

    def summary(self) -> Summary:
        """Return the steps of all rounds in a few numbers."""
        return Summary.of([step for steps in self.rounds for step in steps])


@dataclass
class Rate:
    """One rate of the links, and what was measured at it.

    Args:
        asked: Gbit/s, or None where nothing limits the links.
        payload: Gbit/s that a raw TCP stream carried, before and after.
        trials: what was measured, by contender.
    """

    asked: float | None
    payload: list[float] = field(default_factory=list)
    trials: dict[str, Trial] = field(default_factory=dict)

    @property
    def gbit(self) -> float:
        """What the link carries: the best that was seen, since whatever else the machine does only slows a stream."""
        return max(self.payload)

    @property
    def label(self) -> str:
        """The rate in words."""
        return "unlimited" if self.asked is None else f"{self.asked:g} Gbit/s"

    def bound(self, name: str) -> float:
        """Return the seconds that the bytes of a contender's step need on this link, whatever else happens."""
        return Summary.of(self.trials[name].sent).median * 8e-9 / self.gbit

    def medians(self) -> dict[str, float]:
        """Return the median seconds of a step of every contender that did not fail, the fastest first."""
        found = {name: trial.summary().median for name, trial in self.trials.items() if not trial.error}
        return dict(sorted(found.items(), key=lambda item: item[1]))


def times(rate: Rate, work: str) -> Table:
    """Return the table of one rate."""
    medians = rate.medians()
    peers = [targets.best(glob, medians) for glob in ("horovod/*/fp16", "ddp/gloo/fp16")]
    rows = [[name, *_times(rate, name), *(_ratio(medians, peer, name) for peer in peers), *_bytes(rate, name)]
            for name in medians]  # fmt: skip
    title = f"{work}: {count(WORK[work]()):,} gradients, {rate.label} ({rate.gbit:.3f} Gbit/s of payload)"
    compared = " and ".join(peer for peer in peers if peer) or "nobody here"
    caption = (
        f"ms a step: median and minimum. x: how many times as fast as {compared}. MB sent: what left a host in a step; "
        f"bound: the ms that those need on this link.{_choices(rate)}"
    )
    return reporting.table(title, COLUMNS, rows, caption)


def failures(rate: Rate, console: Console) -> None:
    """Print who failed and why."""
    for name, trial in rate.trials.items():
        if trial.error:
            console.print(f"[red]{name} failed[/] at {rate.label}:")
            console.print(trial.error, markup=False, highlight=False)


def draw(rate: Rate, work: str, path: Path, machine: str) -> None:
    """Draw the times of one rate."""
    medians = rate.medians()
    title = f"Averaging {work}'s gradients, {rate.label}\n{machine}"
    milliseconds = [seconds * 1e3 for seconds in medians.values()]
    bounds = [rate.bound(name) * 1e3 for name in medians]
    reporting.bars(path, title, "ms a step (median)", list(medians), milliseconds, bounds)


def judged(verdicts: Sequence[targets.Verdict]) -> Table:
    """Return the table of what must be reached."""
    rows = [[v.ours, v.against, f"{v.at_least:g} x", f"{v.measured:.2f} x", _yes(v.reached)] for v in verdicts]
    return reporting.table("Must reach", ["ours", "against", "at least", "measured", "reached"], rows)


def memories(found: Sequence[Memory]) -> Table:
    """Return the table of memory."""
    rows = [
        [m.contender, str(m.ranks), f"{m.total / 2**20:,.0f}", f"{m.libraries / 2**20:,.0f}", *_multiple(m)]
        for m in found
    ]
    limit = f"<= {targets.MEMORY_MULTIPLE:g}"
    columns = ["contender", "ranks", "MiB", "of it libraries", "the rest: x gradients", limit]
    caption = (
        "Most resident memory of a rank, less that of one plain process with the same tensors. Libraries: the part "
        "that a tiny network has, too."
    )
    return reporting.table("Memory on top", columns, rows, caption)


def _choices(rate: Rate) -> str:
    """Say which codec `auto` stood for in the last round."""
    autos = {name: trial.own["codec"] for name, trial in rate.trials.items() if name.endswith("/auto") and trial.own}
    return "".join(f" {name} took {codec}." for name, codec in autos.items())


def _multiple(memory: Memory) -> list[str]:
    """How many times the gradients' size it is, and whether that is few enough, which is asked of hvdplus alone."""
    ours = memory.contender.startswith("hvdplus")
    return [f"{memory.multiple:.2f}", _yes(memory.multiple <= targets.MEMORY_MULTIPLE) if ours else "-"]


def _yes(reached: bool) -> str:
    return "yes" if reached else "[red]no[/]"


def _times(rate: Rate, name: str) -> list[str]:
    summary = rate.trials[name].summary()
    return [f"{summary.median * 1e3:,.1f}", f"{summary.minimum * 1e3:,.1f}"]


def _ratio(medians: dict[str, float], peer: str | None, name: str) -> str:
    return f"{medians[peer] / medians[name]:.2f}" if peer else "-"


def _bytes(rate: Rate, name: str) -> list[str]:
    """Bytes that left a host in a step, what they need on the link, and how much of the time that is."""
    bound, trial = rate.bound(name), rate.trials[name]
    sent = Summary.of(trial.sent).median
    return [f"{sent / 1e6:,.2f}", f"{bound * 1e3:,.1f}", f"{bound / trial.summary().median * 100:.0f}"]
