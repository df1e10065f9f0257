"""What a look at a site can find that decides how ranks are started there: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdplus.launch.hosts import Host

#: MPIs that share one binary interface: a program linked to one of a group can be started by another of that group.
_FAMILIES = (("openmpi", "spectrum"), ("mpich", "intelmpi"))


@dataclass(frozen=True)
class Mpi:
    """An MPI's own launcher: how it is called (``mpirun``, ``mpiexec``), and where it lies."""

    implementation: str
    version: str
    name: str
    path: str


@dataclass(frozen=True)
class Horovod:
    """What the installed Horovod can join: Gloo, and an MPI (``openmpi``, ``mpich`` or ``""`` for none)."""

    gloo: bool = True
    mpi: str = ""
    nccl: bool = False


@dataclass(frozen=True)
class Allocation:
    """What a batch system (``slurm``, ``pbs``, ``lsf``) has given; ``inside_step``: srun started this shell."""

    system: str
    hosts: tuple[Host, ...] = ()
    inside_step: bool = False
    cpus_per_task: int | None = None


@dataclass(frozen=True)
class Site:
    """Everything found; what is absent is ``None``."""

    mpi: Mpi | None = None
    srun: str | None = None
    srun_mpi: tuple[str, ...] = ()
    horovodrun: str | None = None
    horovod: Horovod | None = None
    mpi4py: bool = False
    allocation: Allocation | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    host: str = "localhost"
    root: bool = False
    cores: int = 1
    container: bool = False
    scripts: str = ""

    @property
    def in_slurm(self) -> bool:
        """Whether this is inside a Slurm allocation in which srun can be called."""
        return self.srun is not None and self.allocation is not None and self.allocation.system == "slurm"


def same_family(one: str, other: str) -> bool:
    """Say whether two MPI implementations share a binary interface.

    >>> same_family("mpich", "intelmpi"), same_family("openmpi", "mpich")
    (True, False)
    """
    return one == other or any(one in family and other in family for family in _FAMILIES)
