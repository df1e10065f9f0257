"""The command `hvdplus bench`: will compression pay here? Measured on the job's own ranks, shown as one table."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hvdplus import codecs, engines
from hvdplus.codecs.auto import LADDER, Auto
from hvdplus.errors import LaunchError, StrategyError
from hvdplus.session import Framework, Session, start

if TYPE_CHECKING:  # numba and rich take their time, and other commands shall be quick
    from rich.console import Console

    from hvdplus.autotune import Cost, Survey

_ALL = "exact,fp16,bf16,int8,int4,ternary,onebit,topk:0.01,randomk:0.01,powersgd:4"


def bench(
    parameters: Annotated[
        str, typer.Option("--parameters", "-n", metavar="N", help="Gradients in a step of your model: 25.6M, 1.3B.")
    ] = "25.6M",
    names: Annotated[str, typer.Option("--codecs", metavar="LIST", help="Codecs to measure, comma between.")] = _ALL,
    upto: Annotated[
        str, typer.Option("--upto", help=f"The harshest codec that `auto` may take: {', '.join(LADDER)}.")
    ] = "int4",
    framework: Annotated[
        str, typer.Option("--framework", help="Whose engine: torch, tensorflow, or none (mpi4py alone); auto looks.")
    ] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was measured there too; `-` is stdout.")
    ] = None,
) -> None:
    """Say whether gradient compression pays on this network, in under a minute.

    Start it as you start your training, on the hosts and with the launcher you train with:

    * `mpirun -np 2 -H node1,node2 hvdplus bench`
    * `horovodrun --gloo -np 8 -H node1:4,node2:4 hvdplus bench --parameters 124M`
    * `srun -N 2 --ntasks-per-node 4 hvdplus bench`

    It exchanges random gradients in every codec between these very ranks and shows what a step's exchange would take
    for a model of your size, how many bytes leave a rank, and below which bandwidth a codec beats fp16. Nothing is
    hidden behind computation in these figures: in training, part of it is.
    """
    from rich.console import Console

    from hvdplus.autotune import survey

    numbers = _number(parameters)
    specs = _specs(names, upto)
    _check_folder(json_file)
    session = start(_framework(framework))
    session.meet()
    console = Console(stderr=json_file == Path("-"))
    with _progress(session, len(specs)) as progress:
        found = survey(session, specs, progress=progress)
    if session.world.rank == 0:
        _show(found, numbers, upto, session, console)
        if json_file is not None:
            _write(found, json_file)


def _number(text: str) -> int:
    """Read 25.6M."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9}
    try:
        number = float(text[:-1]) * units[text[-1].upper()] if text[-1:].upper() in units else float(text)
        if 1 <= number < math.inf:
            return round(number)
    except ValueError:
        pass
    raise StrategyError(f"--parameters {text!r} must be a number of at least 1, such as 25600000, 25.6M or 1.3B.")


def _specs(names: str, upto: str) -> list[str]:
    """Return what is measured: what was asked for, and what `auto` chooses among."""
    listed = _listed(names)
    for spec in listed:
        if isinstance(codecs.make(spec), Auto):
            raise StrategyError("--codecs has 'auto', which chooses among codecs; name those to measure.")
    return list(dict.fromkeys([*Auto(upto).candidates, *listed]))


def _listed(names: str) -> list[str]:
    """Take a list apart at its commas, but for those in front of a codec's further options."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in names.split(","))):
        key, equals, _ = part.partition("=")
        if equals and ":" not in key and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _framework(name: str) -> Framework[Any]:
    """Return the framework through which is exchanged."""
    modules = {"torch": "hvdplus_torch._session", "tensorflow": "hvdplus_tensorflow._session"}
    if name == "auto":
        name = next((n for n in modules if _installed(n)), "none") if engines.wanted() != "mpi" else "none"
    if name == "none":
        return Framework("numpy", _same, _same, _same, _no_horovod, lambda world: False, lambda: None)
    if name not in modules:
        raise StrategyError(f"--framework {name!r} must be auto, none, {' or '.join(modules)}.")
    if not _installed(name):
        raise LaunchError(f"--framework {name}: {name} is not installed here; install it, or leave the option out.")
    found: Framework[Any] = importlib.import_module(modules[name]).FRAMEWORK
    return found


def _installed(framework: str) -> bool:
    return importlib.util.find_spec(framework) is not None


def _same(value: Any) -> Any:
    return value


def _no_horovod(*args: Any, **kwargs: Any) -> Any:
    raise LaunchError("engine 'horovod' needs a framework it was built for; use --framework torch or tensorflow.")


@contextlib.contextmanager
def _progress(session: Session[Any], total: int) -> Iterator[Callable[[str], object]]:
    """Show on rank 0 which codec's turn it is."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=session.world.rank != 0) as bar:
        task = bar.add_task("measuring the link", total=total)
        turns = iter(range(total))
        yield lambda codec: bar.update(task, description=f"measuring {codec}", completed=next(turns))


def _show(found: Survey, numbers: int, upto: str, session: Session[Any], console: Console) -> None:
    from rich.table import Table

    fp16 = found.cost("fp16") if any(cost.codec == "fp16" for cost in found.costs) else None
    table = Table(title=f"A step's exchange of {numbers:,} gradients, {found.ranks} rank(s), engine {session.engine}")
    table.add_column("codec")
    for heading in ("ms", "x fp16", "MB a rank", "own work, ms", "beats fp16 below"):
        table.add_column(heading, justify="right")
    for cost in sorted(found.costs, key=lambda cost: cost.seconds(numbers)):
        table.add_row(*_row(cost, fp16, numbers))
    console.print(table)
    if found.ranks == 1:
        console.print(
            "There is one rank, so no network was measured, only the codecs' own work. Start it on the hosts you train "
            "on: mpirun -np 2 -H node1,node2 hvdplus bench"
        )
        return
    best = found.fastest(numbers, Auto(upto).candidates)
    console.print(
        f"The link: {found.bits_per_second / 1e9:.3g} Gbit/s to a rank, {found.latency * 1e6:,.0f} us for a small "
        f"message.\n{_verdict(best, upto)}"
    )


def _row(cost: Cost, fp16: Cost | None, numbers: int) -> list[str]:
    seconds = cost.seconds(numbers)
    ratio, below = "", ""
    if fp16 is not None and cost.codec != "fp16":
        bits = cost.pays_below(fp16)
        ratio = f"{fp16.seconds(numbers) / seconds:.2f}"
        below = "never" if bits == 0 else "always" if math.isinf(bits) else f"{bits / 1e9:,.2g} Gbit/s"
    own, sent = cost.own * numbers, cost.bytes_each * numbers
    return [cost.codec, f"{seconds * 1e3:,.1f}", ratio, f"{sent / 1e6:,.1f}", f"{own * 1e3:,.1f}", below]


def _verdict(best: str, upto: str) -> str:
    if best == "exact":
        return "Compression does not pay here: stay with 'exact'."
    return f"strategy='auto{'' if upto == 'int4' else ':' + upto}' takes '{best}' here."


def _check_folder(file: Path | None) -> None:
    """Refuse a file that cannot be written, before a minute is spent on what would be in it."""
    if file is None or file == Path("-"):
        return
    if file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise StrategyError(f"--json {str(file)!r} cannot be written; name a file in a folder that exists, or '-'.")


def _write(found: Survey, file: Path) -> None:
    if file == Path("-"):
        sys.stdout.write(found.to_json() + "\n")
    else:
        file.write_text(found.to_json() + "\n")
