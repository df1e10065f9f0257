"""The requests a codec can make, the protocol that serves them, and the one-rank answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


@dataclass(frozen=True)
class AllReduce(Generic[A]):
    """Ask for the sum over ranks of ``value * scale``, elementwise; the answer has the value's shape.

    ``value`` is given up: an engine may write the answer into it.
    """

    value: A
    scale: float = 1.0


@dataclass(frozen=True)
class AllGather(Generic[A]):
    """Ask for every rank's ``value`` (shape ``(n,)``, equal on all ranks); the answer is ``(ranks, n)``."""

    value: A


@dataclass(frozen=True)
class AllToAll(Generic[A]):
    """Give row i of ``value`` (shape ``(ranks, n)``) to rank i; row j of the answer came from rank j."""

    value: A


@dataclass(frozen=True)
class ReduceScatter(Generic[A]):
    """Ask for this rank's row of the sum over ranks of ``value * scale`` (``(ranks, n)``); the answer is ``(n,)``."""

    value: A
    scale: float = 1.0


@dataclass(frozen=True)
class Broadcast(Generic[A]):
    """Ask for ``root``'s ``value``; the answer has its shape and may be written into ``value``."""

    value: A
    root: int = 0


Request = AllReduce[A] | AllGather[A] | AllToAll[A] | ReduceScatter[A] | Broadcast[A]


class Pending(Protocol[A_co]):
    """A request on its way.

    One whose bytes move only while ``done`` is called says so by an attribute ``moves_when_asked``, which is true.
    """

    def done(self) -> bool:
        """Whether ``result`` would return at once."""

    def result(self) -> A_co:
        """Return the answer, waiting without a limit if it is not there yet."""


class Collectives(Protocol[A]):
    """What an engine offers: it starts requests for one kind of array among a fixed group of ranks."""

    rank: int
    size: int
    label: str  # which group of ranks, the same on all of them

    def own(self) -> Pending[Collectives[A]]:
        """Ask for the same group for one user alone, whose requests can then not meet anybody else's.

        All ranks call this together.
        """

    def start(self, request: Request[A], name: str) -> Pending[A]:
        """Send ``request`` on its way under ``name``, which is the same on all ranks and unique in flight."""

    def sums(self, value: A, dtype: str) -> bool:
        """Whether the wire adds ``dtype`` well (speed and precision) where ``value`` lives."""


@dataclass(frozen=True)
class Ready(Generic[A]):
    """A request that is answered already."""

    value: A

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self) -> A:
        """Return the answer."""
        return self.value


@dataclass(frozen=True)
class Mapped(Generic[A]):
    """A request on its way whose answer is to become something else."""

    inner: Pending[Any]
    convert: Callable[[Any], A]

    @property
    def moves_when_asked(self) -> bool:
        """Ask the request itself."""
        return getattr(self.inner, "moves_when_asked", False)

    def done(self) -> bool:
        """Ask the request itself."""
        return self.inner.done()

    def result(self) -> A:
        """Wait, and convert the answer."""
        return self.convert(self.inner.result())


class LocalCollectives:
    """The engine of one rank: every answer is what was given."""

    rank = 0
    size = 1
    label = "alone"

    def own(self) -> Pending[LocalCollectives]:
        """Return itself."""
        return Ready(self)

    def start(self, request: Request[Any], name: str) -> Pending[Any]:
        """Answer ``request`` at once."""
        value = request.value
        if isinstance(request, AllReduce | ReduceScatter) and request.scale != 1.0:
            value = value * request.scale
        if isinstance(request, AllGather):
            value = value[None]
        return Ready(value[0] if isinstance(request, ReduceScatter) else value)

    def sums(self, value: Any, dtype: str) -> bool:
        """Return True: there is nothing to add."""
        return True


def wire_bytes(request: Request[Any], nbytes: int, size: int) -> int:
    """Bytes that one of ``size`` ranks sends for a request whose value has ``nbytes`` bytes.

    A ring all-reduce sends the value twice less one share, its halves once, an all-gather to every peer
    (derivation: NVIDIA/nccl-tests, doc/PERFORMANCE.md).
    """
    if size == 1:
        return 0
    if isinstance(request, AllReduce):
        return 2 * nbytes * (size - 1) // size
    if isinstance(request, AllToAll | ReduceScatter):
        return nbytes * (size - 1) // size
    return nbytes * (size - 1)
