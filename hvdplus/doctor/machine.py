"""What the checks ask of a machine: a protocol, so that a machine of planted facts can stand in for the real one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hvdplus.build.found import TensorFlow, Torch
from hvdplus.build.record import Record
from hvdplus.launch.site import Site


@dataclass(frozen=True)
class Interface:
    """A network interface with an IPv4 address."""

    name: str
    address: str


@dataclass(frozen=True)
class Script:
    """A training script and its text; ``modules`` are the texts of modules beside it, by name."""

    name: str
    text: str
    modules: Mapping[str, str] = field(default_factory=dict)


class Machine(Protocol):
    """The facts. Each is looked up when it is first asked for, and may then fail for itself."""

    @property
    def site(self) -> Site:
        """Launchers, MPI, what Horovod can join, the environment."""

    @property
    def python(self) -> str:
        """The interpreter's version."""

    @property
    def packages(self) -> Mapping[str, str]:
        """Versions of those packages that are installed."""

    @property
    def torch(self) -> Torch | None:
        """PyTorch and what it is built for."""

    @property
    def tensorflow(self) -> TensorFlow | None:
        """TensorFlow and what it is built for."""

    @property
    def record(self) -> Record | None:
        """What Horovod was built for, where hvdplus built it."""

    @property
    def built_for(self) -> Mapping[str, str]:
        """Framework versions that Horovod's own metadata names."""

    @property
    def current(self) -> tuple[str, ...]:
        """The parts of a build's key that a build of now would have: interpreter and frameworks."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """What this host's own name resolves to."""

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """All network interfaces with an address, loopback among them."""

    @property
    def routed(self) -> str | None:
        """The interface of the default route."""

    @property
    def shm_bytes(self) -> int | None:
        """Size of ``/dev/shm``; ``None`` where there is none."""

    @property
    def memlock_bytes(self) -> int | None:
        """How much memory a process may lock (``ulimit -l``); ``None`` for no limit."""

    @property
    def infiniband(self) -> tuple[str, ...]:
        """Names of InfiniBand or RoCE devices."""

    @property
    def gpus(self) -> int:
        """Number of NVIDIA GPUs that the driver shows."""

    @property
    def script(self) -> Script | None:
        """The user's training script, where one was given."""
