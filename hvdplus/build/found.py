"""What a look at a machine can find: plain values, nothing that looks by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Torch:
    """PyTorch as its own files describe it; `standard` is the C++ its headers insist on."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    standard: int | None = None


@dataclass(frozen=True)
class TensorFlow:
    """TensorFlow and the distribution (`tensorflow`, `tensorflow-cpu`, ...) that brought it."""

    version: str
    distribution: str = "tensorflow"
    cuda: bool = False


@dataclass(frozen=True)
class Mpi:
    """One MPI: its C++ compiler wrapper and the launcher that lies beside it."""

    implementation: str
    version: str
    mpicxx: str
    mpirun: str | None
    in_environment: bool = False


@dataclass(frozen=True)
class Compiler:
    """The real C++ compiler, as the words of a command."""

    command: tuple[str, ...]
    kind: str
    version: str


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit with `nvcc`."""

    home: str
    version: str


@dataclass(frozen=True)
class Nccl:
    """NCCL's header directory and its shared library."""

    version: str
    include: str
    library: str


@dataclass(frozen=True)
class Machine:
    """The interpreter and the machine it runs on."""

    python: str
    arch: str
    libc: str
    cores: int
    memory_gib: float
    headers: bool = True
    managed: bool = False


@dataclass(frozen=True)
class Probe:
    """Everything found; what is absent is None."""

    machine: Machine
    torch: Torch | None = None
    tensorflow: TensorFlow | None = None
    mpi: Mpi | None = None
    compiler: Compiler | None = None
    cmake: str | None = None
    make: str | None = None
    cuda: Cuda | None = None
    nccl: Nccl | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
