"""The command `hvdplus doctor`: shows what is right and wrong here on one screen, or as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hvdplus.doctor.examine import examine, is_fine
from hvdplus.doctor.finding import Finding
from hvdplus.doctor.here import Here
from hvdplus.doctor.link import Measured, measure_link
from hvdplus.errors import LaunchError
from hvdplus.version import __version__

if TYPE_CHECKING:  # rich is imported where it is needed: JSON shall be quick
    from rich.table import Table

_MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "bad": "[bold red]BAD[/]"}


def doctor(
    script: Annotated[
        Path | None, typer.Option("--script", metavar="FILE", help="Look into a training script, too.")
    ] = None,
    hosts: Annotated[
        str, typer.Option("--hosts", metavar="a,b", help="Start two ranks across two hosts; measure the way between.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is right and wrong on this machine, and how to mend it.

    Looks at frameworks, Horovod and what it was built for, MPI, launchers, the host name, network, memory and GPUs.
    Nothing is changed and no framework is imported. The exit status is 1 if something is bad; warnings do not count.

        hvdplus doctor

        hvdplus doctor --script train.py

        hvdplus doctor --hosts boxa,boxb

        hvdplus doctor --hosts localhost,localhost --json
    """
    if script is not None and not script.is_file():
        raise LaunchError(f"--script {script} is no file; name the training script.")
    machine = Here(script)
    findings = examine(machine)
    measured = measure_link(machine.site, hosts) if hosts else None
    everything = [*findings, *([measured.finding] if measured else [])]
    if as_json:
        typer.echo(json.dumps(as_data(everything, measured), indent=1))
    else:
        show(everything, measured)
    if not is_fine(everything):
        raise typer.Exit(1)


def as_data(findings: Sequence[Finding], measured: Measured | None) -> dict[str, object]:
    """Return what JSON shows."""
    return {
        "version": __version__,
        "host": platform.node(),
        "fine": is_fine(findings),
        "findings": [asdict(finding) for finding in findings],
        "link": [asdict(row) for row in measured.rows] if measured else [],
    }


def show(findings: Sequence[Finding], measured: Measured | None) -> None:
    """Print everything on one screen."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"[bold]hvdplus {__version__}[/] on {platform.node()}")
    console.print(finding_table(findings))
    if measured and measured.rows:
        console.print(link_table(measured))
    counts = [sum(finding.status == status for finding in findings) for status in ("ok", "warn", "bad")]
    console.print("{} right, {} to think about, {} wrong.".format(*counts))


def finding_table(findings: Sequence[Finding]) -> Table:
    """Lay out the findings, each fix below what it mends."""
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(_MARKS[finding.status], finding.check, escape(finding.what))
        if finding.fix:
            table.add_row("", "", f"[cyan]->[/] {escape(finding.fix)} [dim]{escape(finding.link)}[/]")
    return table


def link_table(measured: Measured) -> Table:
    """Lay out what was measured between two ranks."""
    from rich.table import Table

    table = Table("bytes", "us one way", "MB/s", "Gbit/s")
    for column in table.columns:
        column.justify = "right"
    for row in measured.rows:
        rate = row.megabytes_a_second
        table.add_row(f"{row.size:,}", f"{row.microseconds:,.1f}", f"{rate:,.1f}", f"{rate * 8 / 1000:,.3f}")
    return table
