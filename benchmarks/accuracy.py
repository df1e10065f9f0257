"""What codecs cost in accuracy: a GPT trained in each of them, and how far its validation loss ends above exact's.

python benchmarks/accuracy.py --out build/accuracy            # hours on two cores; started again, it goes on
python benchmarks/accuracy.py --out build/accuracy --report   # only says what is there

Every run is `examples/torch_gpt.py` under `mpirun`: the same first weights, batches and steps for all codecs of a seed.
OUT gets `results.jsonl` (a line for each finished run), and of those `accuracy.json`, `accuracy.md` and `accuracy.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, mode
from typing import Any

import matplotlib
import reporting
from matplotlib import pyplot
from matplotlib.ticker import LogLocator
from rich.console import Console
from rich.table import Table

from hvdplus import codecs

EXAMPLE = Path(__file__).parent.parent / "examples" / "torch_gpt.py"

# Codec, and by how many percent its loss may end above exact's.
ALLOWED = {"int8": 0.3, "int4": 0.7, "ternary": 2.0, "onebit": 4.0, "powersgd:16": 1.0}
OTHERS = ("fp16", "bf16", "powersgd:4", "topk:0.05", "topk:0.01", "randomk:0.05", "randomk:0.01")
WITHOUT_MOMENTUM = ("exact", "topk:0.05", "topk:0.01", "topk:0.001", "randomk:0.01", "onebit", "powersgd:4")
FINER_AVERAGES = ("onebit:averages=ternary", "onebit:averages=int4", "ternary:averages=int4")
BLOCKS = (32, 64, 128, 256, 512)
SWEPT = ("onebit", "ternary", "int4")
MORE_RANKS = 4
AS_THEY_ARE = ("exact", "fp16", "bf16")  # codecs that need no dense steps first

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run. The batch is that of all ranks together, so more ranks have smaller shares of it."""

    codec: str
    seed: int
    ranks: int
    dense: int  # first steps that travel exact
    momentum: float = 0.9  # AdamW's first beta after those

    @property
    def strategy(self) -> str:
        """What `examples/torch_gpt.py` is given."""
        return f"{self.codec},warmup_steps={self.dense}" if self.dense else self.codec


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results, made if it is not there")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(%(default)s)")
    parser.add_argument("--dense", type=int, default=30, help="first steps that travel exact (%(default)s)")
    parser.add_argument("--size", default="3m", help="millions of parameters (%(default)s)")
    parser.add_argument("--context", type=int, default=64, help="bytes in a sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in all ranks' batches together (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate (%(default)s)")
    parser.add_argument("--windows", type=int, default=256, help="sequences to an evaluation (%(default)s)")
    return parser.parse_args()


# -- what is run


def jobs(seeds: Sequence[int], dense: int) -> Iterator[Job]:
    """Give all runs, the most telling ones first."""
    first, *more = seeds
    yield from (job(codec, first, dense) for codec in ("exact", *ALLOWED, *OTHERS))
    yield from (job(codec, seed, dense) for seed in more for codec in ("exact", *ALLOWED))
    yield from (job(codec, first, dense, MORE_RANKS) for codec in ("exact", *SWEPT, "int8"))
    yield from (job(spec, seed, dense) for seed in seeds for codec in SWEPT for spec in other_blocks(codec))
    yield from (Job(codec, seed, 2, dense, 0.0) for seed in seeds for codec in WITHOUT_MOMENTUM)
    yield from (job("topk:0.01", first, times * dense) for times in (0, 3))
    yield from (job(spec, first, dense, MORE_RANKS) for spec in FINER_AVERAGES)
    yield from (job(codec, seed, dense) for seed in more for codec in OTHERS)
    yield from (job(codec, first, 0) for codec in ALLOWED)


def other_blocks(codec: str) -> list[str]:
    """Return a codec's specs with all sizes of blocks but its own one.

    Example:
        >>> other_blocks("int4")
        ['int4:32', 'int4:64', 'int4:128', 'int4:512']
    """
    return [spec for block in BLOCKS if codecs.make(spec := f"{codec}:{block}") != codecs.make(codec)]


def job(codec: str, seed: int, dense: int, ranks: int = 2) -> Job:
    """Make a job, without dense steps where the codec needs none."""
    return Job(codec, seed, ranks, 0 if codec in AS_THEY_ARE else dense)


def settings(args: argparse.Namespace) -> Row:
    """Return what all runs of a study have in common, as options of the example."""
    names = ("size", "context", "batch", "steps", "lr", "windows")
    return {name: getattr(args, name) for name in names} | {"warmup": args.steps // 10, "evaluate": args.steps // 3}


def command(job: Job, common: Row, log: Path) -> list[str]:
    """Return the command line of one run."""
    options = [part for name, value in common.items() for part in (f"--{name}", str(value))]
    launcher = ["mpirun", "-np", str(job.ranks), "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
    program = [sys.executable, str(EXAMPLE), "--strategy", job.strategy, "--seed", str(job.seed), "--diary", str(log)]
    program += ["--momentum", str(job.momentum)]
    return [*launcher, *program, *options]


def run(job: Job, common: Row, out: Path) -> bool:
    """Make one run and append its line to the results; say whether it went well."""
    log = out / "run.jsonl"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environ = {"OMP_NUM_THREADS": "1", "HVDPLUS_ENGINE": "mpi", **os.environ, "PATH": path}
    with words(job, out).open("w") as file:
        ended = subprocess.run(command(job, common, log), env=environ, stdout=file, stderr=file, check=False)
    if ended.returncode:
        return False
    words(job, out).unlink()
    curve = [json.loads(line) for line in log.read_text().splitlines()]
    with (out / "results.jsonl").open("a") as file:
        about = {"means": meaning(job), "machine": reporting.in_words(reporting.machine())}
        print(json.dumps(asdict(job) | about | {"settings": common, "curve": curve}), file=file)
    return True


def meaning(job: Job) -> str:
    """Return all that a codec's spec stands for: what is left out of it may come to mean something else."""
    return repr(codecs.make(job.codec))


def words(job: Job, out: Path) -> Path:
    """Return where a run's output goes; of runs that went well it is not kept."""
    return out / f"{job.codec.replace(':', '-')}-seed{job.seed}-ranks{job.ranks}-dense{job.dense}-{job.momentum}.txt"


def lines(out: Path, common: Row) -> list[Row]:
    """Return what is known of the finished runs that had the same settings."""
    file = out / "results.jsonl"
    rows: list[Row] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if row["settings"] == common]


def results(out: Path, common: Row) -> dict[Job, list[Row]]:
    """Return the curves of those runs whose codec is still what it was."""
    names = ("codec", "seed", "ranks", "dense", "momentum")
    found = [(Job(*(row[name] for name in names)), row) for row in lines(out, common)]
    return {job: row["curve"] for job, row in found if row["means"] == meaning(job)}


# -- what came of it


def measure(job: Job) -> Job:
    """Return the run that a job is compared with."""
    return Job("exact", job.seed, job.ranks, 0)


def report(found: dict[Job, list[Row]]) -> list[Row]:
    """Return a row for each codec, number of ranks and of dense steps, compared seed by seed with exact's runs."""
    exact = {(job.seed, job.ranks): curve[-1]["loss"] for job, curve in found.items() if job == measure(job)}
    groups: dict[tuple[str, int, int, float], dict[int, list[Row]]] = {}
    for job, curve in found.items():
        if (job.seed, job.ranks) in exact:
            groups.setdefault((job.codec, job.ranks, job.dense, job.momentum), {})[job.seed] = curve
    return [_row(key, curves, exact) for key, curves in groups.items()]


def _row(key: tuple[str, int, int, float], curves: dict[int, list[Row]], exact: dict[tuple[int, int], float]) -> Row:
    codec, ranks, dense, momentum = key
    above = [100 * (curve[-1]["loss"] / exact[seed, ranks] - 1) for seed, curve in curves.items()]
    return {
        "codec": codec, "ranks": ranks, "dense": dense, "momentum": momentum, "seeds": sorted(curves),
        "loss": mean(curve[-1]["loss"] for curve in curves.values()),
        "above_percent": mean(above), "least_percent": min(above), "most_percent": max(above),
        "allowed_percent": ALLOWED.get(codec),
        "bytes_a_step": bytes_a_step(next(iter(curves.values()))),
    }  # fmt: skip


def bytes_a_step(curve: list[Row]) -> float:
    """Return what a rank sends in one step after the dense ones: of the last part of the run."""
    before, last = curve[-2:]
    return float((last["bytes_sent"] - before["bytes_sent"]) / (last["step"] - before["step"]))


def cells(row: Row) -> list[str]:
    """Return a row's texts, in the order of COLUMNS."""
    allowed = row["allowed_percent"]
    spread = f"{row['least_percent']:+.2f} to {row['most_percent']:+.2f}" if len(row["seeds"]) > 1 else ""
    return [
        row["codec"], str(row["ranks"]), str(row["dense"]), f"{row['momentum']:g}",
        f"{row['bytes_a_step'] / 1e6:.3f}", f"{row['loss']:.4f}",
        f"{row['above_percent']:+.2f}", spread, "" if allowed is None else f"{allowed:g}", str(len(row["seeds"])),
    ]  # fmt: skip


COLUMNS = (
    "codec", "ranks", "dense steps", "momentum", "MB a step", "loss", "% above exact", "over seeds", "allowed", "seeds",
)  # fmt: skip


def write(rows: list[Row], common: Row, out: Path) -> None:
    """Print the table, and write it as JSON, Markdown and a plot."""
    machines = list(dict.fromkeys(line["machine"] for line in lines(out, common)))
    table = Table(*COLUMNS, title=f"Validation loss after {common['steps']} steps")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=120).print(table)
    page = [f"| {' | '.join(line)} |" for line in (COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows))]
    page += ["", f"{common['size']} parameters, {common['steps']} steps; {'; '.join(machines)}."]
    (out / "accuracy.md").write_text("\n".join(page) + "\n")
    (out / "accuracy.json").write_text(json.dumps({"settings": common, "machines": machines, "rows": rows}, indent=1))
    plot(rows, out / "accuracy.png")


def hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of (bytes, loss) that no mixture of others beats: the lower convex hull, to the least loss.

    Example:
        >>> hull([(1, 9.0), (2, 4.0), (3, 3.0), (4, 0.0), (5, 0.1)])
        [(1, 9.0), (2, 4.0), (4, 0.0)]
    """
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if found and y >= found[-1][1]:
            continue
        while len(found) > 1 and _slope(found[-2], (x, y)) <= _slope(found[-2], found[-1]):
            found.pop()
        found.append((x, y))
    return found


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def plot(rows: list[Row], path: Path) -> None:
    """Draw percent above exact against bytes a step; a line joins the block sizes, ratios or ranks of one codec."""
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    usual = [row for row in rows if row["ranks"] != MORE_RANKS and row["codec"] != "exact"]
    dense = mode(row["dense"] for row in usual) if usual else 0
    usual = [row for row in usual if row["dense"] == dense or row["codec"] in AS_THEY_ARE]
    blocks = [row for row in usual if row["momentum"] and row["codec"].partition(":")[0] in SWEPT]
    best = hull([(row["bytes_a_step"] / 1e6, row["above_percent"]) for row in blocks])
    if best:
        x, y = zip(*best, strict=True)
        axes.scatter(x, y, s=150, facecolors="none", edgecolors="black", label="no mixture of other blocks beats it")
    families: dict[str, list[Row]] = {}
    for row in usual:
        name = row["codec"].partition(":")[0] + ("" if row["momentum"] else ", no momentum")
        families.setdefault(name, []).append(row)
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(n.partition(",")[0] for n in families))}
    for name, members in families.items():
        codec, _, without = name.partition(",")
        style = {"label": name, "color": colours[codec], "linestyle": "--" if without else "-"}
        _draw(axes, style, sorted(members, key=lambda row: row["bytes_a_step"]))
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="MB that a rank sends in a step", ylabel="validation loss above exact's, %")
    axes.set_yscale("symlog", linthresh=1.0)  # straight up to 1 %
    axes.set_ylim(bottom=-0.15)
    axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    for set_formatter in (
        axes.xaxis.set_major_formatter,
        axes.xaxis.set_minor_formatter,
        axes.yaxis.set_major_formatter,
    ):
        set_formatter("{x:g}")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axes: Any, style: dict[str, str], members: list[Row]) -> None:
    x, y = [row["bytes_a_step"] / 1e6 for row in members], [row["above_percent"] for row in members]
    below = [row["above_percent"] - row["least_percent"] for row in members]
    above = [row["most_percent"] - row["above_percent"] for row in members]
    axes.errorbar(x, y, yerr=[below, above], marker="o", capsize=3, **style)
    for row, where in zip(members, zip(x, y, strict=True), strict=True):
        argument = row["codec"].partition(":")[2]
        axes.annotate(argument, where, textcoords="offset points", xytext=(0, 7), ha="center", fontsize=7)


def main() -> int:
    """Run what is missing, one after the other, and report."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    common, failed = settings(args), []
    todo = [] if args.report else list(dict.fromkeys(jobs(args.seeds, args.dense)))
    for number, job in enumerate(todo, start=1):
        if job in results(args.out, common):
            continue
        print(f"{number}/{len(todo)}  {job.strategy}, seed {job.seed}, {job.ranks} ranks", flush=True)
        if not run(job, common, args.out):
            failed.append(job)
            print(f"  failed: {words(job, args.out)}", flush=True)
    write(report(results(args.out, common)), common, args.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
