"""How much memory an exchange takes on top of a plain process with the same tensors, as multiples of their size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from contenders import group_of
from fleet import Running
from gradients import WORK, count
from hosts import Hosts
from protocol import Turn

PLAIN = "plain/local/none"
CONTENDERS = (
    *(f"hvdplus/mpi4py/{codec}" for codec in ("exact", "fp16", "int8", "onebit", "topk:0.01", "powersgd:4")),
    "hvdplus/gloo/onebit",
    "ddp/gloo/fp16",
)
STEPS = 3
SLOTS = (1, 2)
PATIENCE_SECONDS = 180.0


@dataclass(frozen=True)
class Peak:
    """The most bytes of memory that a rank had: with a tiny network (programs and libraries), and with the real one."""

    tiny: int
    full: int


@dataclass(frozen=True)
class Memory:
    """What an exchange takes.

    Args:
        contender: its name.
        ranks: how many there were.
        total: bytes on top of a plain process.
        libraries: the part of it that programs and libraries take, whatever the size of the gradients.
        gradients: the size of the gradients in bytes.
    """

    contender: str
    ranks: int
    total: int
    libraries: int
    gradients: int

    @property
    def multiple(self) -> float:
        """Residuals and buffers, which is all but the libraries, in multiples of the gradients' size."""
        return (self.total - self.libraries) / self.gradients


def measure(contender: str, plain: Peak, hosts: Hosts, work: str, env: Mapping[str, str]) -> list[Memory]:
    """Measure what a contender takes on top of the plain process, with one rank and with two on every host.

    Raises:
        GroupError: it failed.
    """
    size = 4 * count(WORK[work]())
    found = []
    for slots in SLOTS:
        mine = peak(contender, hosts, slots, work, env)
        total, libraries = mine.full - plain.full, mine.tiny - plain.tiny
        found.append(Memory(contender, slots * len(hosts), total, libraries, size))
    return found


def peak(contender: str, hosts: Hosts, slots: int, work: str, env: Mapping[str, str]) -> Peak:
    """Start a contender's processes, let them take steps with a tiny and the real network, and end them."""
    running = Running(group_of(contender), hosts, slots, env)
    try:
        return Peak(*(_peak(running, contender, network) for network in ("tiny", work)))
    finally:
        running.close()


def _peak(running: Running, contender: str, work: str) -> int:
    turn = Turn(contender, work, warmup=1, steps=STEPS, seconds=PATIENCE_SECONDS, first=0)
    return max(rank.peak_rss for rank in running.ask(turn, PATIENCE_SECONDS))
