"""The command `hvdplus run`: finds the launcher line that works here, shows it, and becomes it."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from hvdplus.build.probe import search_path
from hvdplus.errors import LaunchError
from hvdplus.launch.choice import LAUNCHERS
from hvdplus.launch.hosts import Host, parse_hostfile, parse_hosts
from hvdplus.launch.line import Job, Line, environment, make_line
from hvdplus.launch.look import look

# The options, each with its help; `run` reads like a plain function.
Command = Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The program with its arguments.")]
Ranks = Annotated[
    int | None, typer.Option("-np", "-n", metavar="N", help="Number of ranks [default: all slots of the hosts].")
]
Hosts = Annotated[str, typer.Option("-H", "--hosts", metavar="a:2,b:2", help="Hosts, and ranks on each.")]
Hostfile = Annotated[
    Path | None, typer.Option("--hostfile", metavar="FILE", help="The same in a file, a host a line: 'a slots=2'.")
]
Launcher = Annotated[str, typer.Option("--launcher", metavar="NAME", help=f"One of {', '.join(LAUNCHERS)}.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the line and nothing else; start nothing.")]
AllowRoot = Annotated[bool, typer.Option("--allow-run-as-root", help="Let Open MPI run as root; know what you do.")]
Oversubscribe = Annotated[bool, typer.Option("--oversubscribe", help="Allow more ranks than the hosts have slots.")]
Forward = Annotated[
    list[str] | None,
    typer.Option("-x", metavar="NAME[=VALUE]", help="Take a variable along to all hosts, perhaps set it first."),
]
LauncherArgs = Annotated[
    str, typer.Option("--launcher-args", metavar="ARGS", help="More options for the launcher, in one string.")
]


def run(
    command: Command,
    ranks: Ranks = None,
    hosts: Hosts = "",
    hostfile: Hostfile = None,
    launcher: Launcher = "auto",
    dry_run: DryRun = False,
    allow_root: AllowRoot = False,
    oversubscribe: Oversubscribe = False,
    forward: Forward = None,
    launcher_args: LauncherArgs = "",
) -> None:
    """Start a program on several ranks, with the launcher that works here.

    In a Slurm allocation that is `srun`, elsewhere the MPI's own `mpirun` or `mpiexec`, and `horovodrun` over Gloo
    where there is no MPI or Horovod was built without it. The line is printed, and this process becomes it.

        hvdplus run -np 2 -- python train.py --epochs 3

        hvdplus run -np 4 -H boxa:2,boxb:2 -- python train.py

        hvdplus run --hostfile hosts -x DATA=/data -- python train.py

        hvdplus run -np 4 --dry-run -- python train.py > start.sh

    Variables that begin with HVDPLUS_, HOROVOD_, NCCL_, OMP_, TF_, KERAS_, CUDA_, PYTHON and the like, PATH and
    LD_LIBRARY_PATH go along by themselves (CUDA_VISIBLE_DEVICES does not); `-x` takes more.
    """
    job = Job(
        command=checked(command),
        ranks=ranks,
        hosts=read_hosts(hosts, hostfile),
        launcher=launcher,
        allow_root=allow_root,
        oversubscribe=oversubscribe,
        forward=tuple(forward or ()),
        extra=tuple(shlex.split(launcher_args)),
    )
    line = make_line(look(), job)
    for note in line.notes:
        typer.echo(f"hvdplus: {note}", err=True)
    typer.echo(str(line), err=not dry_run)
    if not dry_run:
        become(line)


def read_hosts(hosts: str, hostfile: Path | None) -> tuple[Host, ...]:
    """Read the hosts from one of the two options."""
    if hosts and hostfile:
        raise LaunchError(f"-H {hosts} and --hostfile {hostfile} both name hosts; give one of them.")
    if hostfile is None:
        return parse_hosts(hosts) if hosts else ()
    try:
        return parse_hostfile(hostfile.read_text(), f"--hostfile {hostfile}")
    except OSError as error:
        raise LaunchError(f"--hostfile {hostfile} cannot be read: {error.strerror}; name a file of hosts.") from error


def checked(command: list[str]) -> tuple[str, ...]:
    """Refuse what no rank could start, before every rank says so.

    Raises:
        LaunchError: the program is nowhere on PATH.
    """
    program = command[0]
    if shutil.which(program, path=search_path(os.environ)) is None:
        python = f"; write 'python {program}'" if program.endswith(".py") else ", or name it by its full path"
        raise LaunchError(f"{program!r} is no program on PATH{python}.")
    return tuple(command)


def become(line: Line) -> None:
    """Replace this process by the launcher, so that signals and the exit status are its own."""
    environ = environment(line, os.environ)
    program = shutil.which(line.argv[0], path=environ["PATH"])
    if program is None:
        raise LaunchError(f"{line.argv[0]} is not on PATH any more; look at it with --dry-run.")
    os.execve(program, line.argv, environ)
