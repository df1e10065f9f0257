"""Finds rank, size and local rank in a mapping of environment variables, and says which launcher it believed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdplus.errors import LaunchError


@dataclass(frozen=True)
class World:
    """Where this process stands among the processes of its job.

    ``local_rank`` and ``local_size`` are ``None`` where the launcher does not tell them; ``init()`` of an
    adapter then finds them by comparing host names. ``launcher`` is ``"none"`` for a process started alone.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    launcher: str


@dataclass(frozen=True)
class _Family:
    """The variables one launcher sets; ``proof`` is a further one without which the pair means nothing."""

    launcher: str
    rank: str
    size: str
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    proof: str | None = None


# Innermost launcher first. Slurm comes last because whatever else is set was started inside its step.
_OVERRIDE = _Family("override", "HVDPLUS_RANK", "HVDPLUS_SIZE", ("HVDPLUS_LOCAL_RANK",), ("HVDPLUS_LOCAL_SIZE",))
_ELASTIC = _Family(
    "torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), proof="TORCHELASTIC_RUN_ID"
)
_PMI = _Family(
    "mpich",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
_MPI_LIKE = (
    _Family("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", ("HOROVOD_LOCAL_RANK",), ("HOROVOD_LOCAL_SIZE",)),
    _Family(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Family(
        "mvapich2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Family("platform-mpi", "MPI_RANKID", "MPI_NRANKS", ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
    _Family("pals", "PALS_RANKID", "PALS_SIZE", ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE",)),
    # Not every PALS tells the size; then it is counted, under a name that no environment can have.
    _Family("pals", "PALS_RANKID", "PBS_NODEFILE x PALS_LOCAL_SIZE", ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE",)),
    _Family("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", ("JSM_NAMESPACE_LOCAL_RANK",)),
    _PMI,
)
_TORCH_ENV = _Family("torch-env", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_FLUX = _Family("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", ("FLUX_TASK_LOCAL_ID",))
# A batch script without srun has SLURM_PROCID too, but no step; and the job's SLURM_NTASKS is not the step's.
_SLURM = _Family("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), proof="SLURM_STEP_ID")

#: Launchers whose processes an MPI library can join by itself.
MPI_LAUNCHERS = frozenset({"openmpi", "mvapich2", "platform-mpi", "pals", "jsrun", "mpich", "slurm", "flux"})


def discover(environ: Mapping[str, str] = os.environ, *, require_launcher: bool = False) -> World:
    """Read this process's place in its job from the variables its launcher set.

    Families of variables are read as a whole, never mixed; the innermost launcher wins. A process that no
    launcher started is rank 0 of 1 with launcher ``"none"``. ``HVDPLUS_RANK`` and ``HVDPLUS_SIZE`` go before every
    launcher; ``HVDPLUS_LOCAL_RANK`` may also stand alone, to correct what a launcher says.

    Args:
        environ: the environment to read; a plain mapping in tests.
        require_launcher: refuse a process that no launcher started.

    Raises:
        LaunchError: a value is no valid number, a rank has no size, two launchers contradict each other, or there is
            none and ``require_launcher`` asks for one.
    """
    _refuse_half_override(environ)
    world = _found(_with_pals_size(environ))
    if require_launcher and world.launcher == "none":
        raise LaunchError(
            "no launcher started this process (no variables of horovodrun, mpirun, srun or the like), and "
            "require_launcher=True wants one: start it with 'hvdplus run -np N -- python train.py'."
        )
    return _with_local_rank(world, environ)


def _found(environ: Mapping[str, str]) -> World:
    """Choose among the families that are there."""
    for family in (_OVERRIDE, _ELASTIC):
        if (world := _read(family, environ)) is not None:
            return world
    inner = [(family, world) for family in _MPI_LIKE if (world := _read(family, environ)) is not None]
    slurm = _read(_SLURM, environ)
    inner = _without_step_pmi(inner, slurm)
    plain = _read(_TORCH_ENV, environ)
    _refuse_contradiction([*inner, *([(_TORCH_ENV, plain)] if plain else [])], environ)
    outer = (plain, _read(_FLUX, environ), slurm)
    found = [world for _, world in inner] + [world for world in outer if world is not None]
    if not found:
        _refuse_rank_without_size(environ)
    return found[0] if found else World(0, 1, 0, 1, "none")


def _read(family: _Family, environ: Mapping[str, str]) -> World | None:
    needed = [family.rank, family.size] + ([family.proof] if family.proof else [])
    if any(not environ.get(name) for name in needed):
        return None
    rank, size = _number(family.rank, environ), _number(family.size, environ)
    local_rank = _first_number(family.local_rank, environ)
    local_size = _first_number(family.local_size, environ)
    if family is _SLURM:
        local_size = _slurm_local_size(environ)
    _check(family, rank, size, local_rank, local_size)
    if size == 1:
        local_rank, local_size = 0, 1
    return World(rank, size, local_rank, local_size, family.launcher)


def _check(family: _Family, rank: int, size: int, local_rank: int | None, local_size: int | None) -> None:
    if size < 1 or rank >= size:
        raise LaunchError(
            f"{family.rank}={rank} and {family.size}={size} contradict each other: a rank is at least 0 and less "
            f"than the size; unset the variables that do not belong to this job, or set HVDPLUS_RANK and HVDPLUS_SIZE."
        )
    if local_rank is not None and local_size is not None and local_rank >= local_size:
        raise LaunchError(
            f"local rank {local_rank} of local size {local_size} ({', '.join(family.local_rank)}; "
            f"{', '.join(family.local_size) or 'SLURM_STEP_TASKS_PER_NODE'}) is impossible: a local rank is less than "
            f"the local size; set HVDPLUS_RANK, HVDPLUS_SIZE, HVDPLUS_LOCAL_RANK and HVDPLUS_LOCAL_SIZE."
        )


def _number(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name].strip()
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII):
        raise LaunchError(
            f"{name}={environ[name]!r} is not a whole number of 0 or more; unset it, or correct what sets it."
        )
    return int(text)


def _first_number(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    for name in names:
        if environ.get(name):
            return _number(name, environ)
    return None


def tasks_per_node(text: str, name: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """Expand Slurm's run-length form: ``2(x3),1`` is ``[2, 2, 2, 1]``.

    Raises:
        LaunchError: the text, the value of the variable ``name``, is not of that form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:\(x([0-9]+)\))?\s*", part, re.ASCII)
        if match is None:
            raise LaunchError(f"{name}={text!r} is not of Slurm's form such as '2(x3),1'; unset it or correct it.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    text = environ.get("SLURM_STEP_TASKS_PER_NODE")
    node = _first_number(("SLURM_NODEID",), environ)
    if not text or node is None:
        return None
    counts = tasks_per_node(text)
    return counts[node] if node < len(counts) else None


def _without_step_pmi(inner: list[tuple[_Family, World]], slurm: World | None) -> list[tuple[_Family, World]]:
    """Drop PMI variables that the surrounding Slurm step set for its own task, where an inner launcher is there."""
    if slurm is None or len(inner) < 2:
        return inner
    step = (slurm.rank, slurm.size)
    return [(family, world) for family, world in inner if family is not _PMI or (world.rank, world.size) != step]


def _refuse_contradiction(found: list[tuple[_Family, World]], environ: Mapping[str, str]) -> None:
    for family, world in found[1:]:
        first_family, first = found[0]
        if (world.rank, world.size) != (first.rank, first.size):
            raise LaunchError(
                f"two launchers contradict each other: {_quote(first_family, environ)} ({first.launcher}) but "
                f"{_quote(family, environ)} ({world.launcher}); unset the set that does not belong to this job, or "
                f"set HVDPLUS_RANK and HVDPLUS_SIZE."
            )


def _quote(family: _Family, environ: Mapping[str, str]) -> str:
    return f"{family.rank}={environ[family.rank]} {family.size}={environ[family.size]}"


def _with_pals_size(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Add the size that PALS leaves out: its nodes, which the batch system lists, times the ranks on each.

    Source: https://github.com/meta-pytorch/torchcomms/pull/79. A node may have one line a slot in that file.
    """
    path = environ.get("PBS_NODEFILE")
    if not environ.get("PALS_RANKID") or environ.get("PALS_SIZE") or not environ.get("PALS_LOCAL_SIZE") or not path:
        return environ
    try:
        nodes = {line.strip() for line in Path(path).read_text(errors="replace").splitlines()} - {""}
    except OSError:
        return environ
    return {**environ, "PBS_NODEFILE x PALS_LOCAL_SIZE": str(len(nodes) * _number("PALS_LOCAL_SIZE", environ))}


def _with_local_rank(world: World, environ: Mapping[str, str]) -> World:
    """Let ``HVDPLUS_LOCAL_RANK`` and ``HVDPLUS_LOCAL_SIZE`` correct a launcher that counts hosts wrongly."""
    local_rank = _first_number(_OVERRIDE.local_rank, environ)
    local_size = _first_number(_OVERRIDE.local_size, environ)
    if local_rank is None:
        return world
    if local_size is None and world.local_size is not None and local_rank < world.local_size:
        local_size = world.local_size
    most = world.size if local_size is None else local_size
    if local_rank >= most or most > world.size:
        raise LaunchError(
            f"HVDPLUS_LOCAL_RANK={local_rank} of HVDPLUS_LOCAL_SIZE={most} is impossible among {world.size} ranks: a "
            f"local rank is less than the local size, and that at most the size; correct or unset them."
        )
    return replace(world, local_rank=local_rank, local_size=local_size)


def _refuse_rank_without_size(environ: Mapping[str, str]) -> None:
    """Refuse a rank among an unknown number: to go on as rank 0 of 1 would train alone, without a word."""
    families = (_ELASTIC, *_MPI_LIKE, _FLUX, _SLURM)
    for family in families:
        proven = family.proof is None or environ.get(family.proof)
        if environ.get(family.rank) and proven:
            raise LaunchError(
                f"{family.rank}={environ[family.rank]} says that a launcher ({family.launcher}) started this process, "
                f"but {family.size} does not say how many ranks there are; set HVDPLUS_RANK and HVDPLUS_SIZE, or start "
                f"it with horovodrun, mpirun or srun."
            )


def _refuse_half_override(environ: Mapping[str, str]) -> None:
    names = (_OVERRIDE.rank, _OVERRIDE.size)
    there = [name for name in names if environ.get(name)]
    if len(there) == 1:
        missing = names[1] if there[0] == names[0] else names[0]
        raise LaunchError(f"{there[0]}={environ[there[0]]} needs {missing} beside it; set both or neither.")
    local_size = environ.get("HVDPLUS_LOCAL_SIZE")
    if local_size and not environ.get("HVDPLUS_LOCAL_RANK"):
        raise LaunchError(f"HVDPLUS_LOCAL_SIZE={local_size} needs HVDPLUS_LOCAL_RANK beside it; set both or neither.")


# --- the variables themselves -------------------------------------------------------------------------------


def variables(launcher: str) -> tuple[str, ...]:
    """Name the variables of rank and size in which a launcher's word is read; none for ``"none"``."""
    families = (_OVERRIDE, _ELASTIC, *_MPI_LIKE, _TORCH_ENV, _FLUX, _SLURM)
    return next(((family.rank, family.size) for family in families if family.launcher == launcher), ())


# What tells a process that it is a rank, and what leads a nested launcher to the outer one's servers. Settings that a
# user makes (OMPI_MCA_btl..., HOROVOD_CYCLE_TIME, SLURM_JOB_ID, NCCL_...) are not among them.
_OF_A_RANK = re.compile(
    r"OMPI_(COMM_WORLD_|WORLD_|UNIVERSE_SIZE|NUM_APP_CTX|FIRST_RANKS|APP_CTX|FILE_LOCATION|COMMAND|ARGV|TOOL_NAME"
    r"|MCA_(ess|orte_(?!default_hostfile|keep_fqdn|set_default)|pmix|initial_wdir|num_procs|PREFIXES))"
    r"|PMI_|PMIX_(?!MCA_)|PRTE_LAUNCHED|MV2_COMM_WORLD_|MPI_(LOCALRANKID|LOCALNRANKS|RANKID|NRANKS)|HYDI_"
    r"|PALS_|JSM_|FLUX_(TASK_|JOB_SIZE|JOB_NNODES)|SLURM_(PROCID|LOCALID|NODEID|STEP|TASK_PID|GTIDS)"
    r"|HOROVOD_(RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|GLOO_|CONTROLLER|CPU_OPERATIONS|ELASTIC)"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|TORCHELASTIC_|HVDPLUS_(LOCAL_)?(RANK|SIZE)$"
)


def clean_env(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a child of a rank: without what would make the child believe it is that rank.

    A program that a rank starts inherits its launcher's variables, and a launcher among them refuses or does nothing.

    >>> clean_env({"PATH": "/bin", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_btl": "self"})
    {'PATH': '/bin', 'OMPI_MCA_btl': 'self'}
    """
    return {name: value for name, value in environ.items() if not _OF_A_RANK.match(name)}


# --- hosts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A rank among the ranks of its host, and its host among those that have a rank of that number."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def places(hosts: Sequence[str]) -> list[Place]:
    """Find every rank's place from all ranks' host names, in rank order.

    >>> [place.local_rank for place in places(["a", "a", "a", "b"])]
    [0, 1, 2, 0]
    """
    local = [list(hosts[:rank]).count(host) for rank, host in enumerate(hosts)]
    return [
        Place(mine, list(hosts).count(host), local[:rank].count(mine), local.count(mine))
        for rank, (host, mine) in enumerate(zip(hosts, local, strict=True))
    ]
