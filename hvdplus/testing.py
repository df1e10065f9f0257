"""Runs several ranks in one process, for tests: of codecs (one's own included) and of what exchanges through them.

``lockstep`` drives a codec; ``Wire.run`` drives whole programs, a thread a rank. Both serve every collective as an
engine does, and where two ranks ask for different things they raise, which in a real job would be a hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from hvdplus import codecs
from hvdplus.arrays import Arrays, NumPyArray, NumPyArrays
from hvdplus.codecs import Codec, Outcome, Site
from hvdplus.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Pending,
    Ready,
    ReduceScatter,
    Request,
    wire_bytes,
)
from hvdplus.errors import ExchangeError

A = TypeVar("A")
R = TypeVar("R")

_REQUESTS = (AllReduce, AllGather, AllToAll, ReduceScatter, Broadcast)


def lockstep(
    codec: Codec | str,
    inputs: Sequence[A],
    *,
    sites: Sequence[Site[A]] | None = None,
    commit: bool = True,
) -> list[Outcome[A]]:
    """Exchange ``inputs``, one a rank, through ``codec`` and return every rank's outcome.

    Args:
        codec: a codec or its spec.
        inputs: shape ``(n,)``, equal on all ranks; they are copied, because a codec may write into what it gets.
        sites: where the codec works and keeps its state (``Wire.sites``); pass the same ones for a further step.
            ``None`` makes new ones for NumPy arrays.
        commit: keep what the codec stages in its state cells, as a step does that is not thrown away.

    Raises:
        ExchangeError: the ranks ask for different things, or one has finished and another has not.

    Example:
        >>> class Whole:
        ...     def exchange(self, x, site):
        ...         sent = np.rint(x)
        ...         mean = yield AllReduce(sent.copy(), scale=1 / site.size)
        ...         return Outcome(mean, sent)
        >>> outcomes = lockstep(Whole(), [np.array([1.4, 2.0]), np.array([0.6, 4.0])])
        >>> outcomes[0].mean.tolist(), outcomes[1].sent.tolist()
        ([1.0, 3.0], [1.0, 4.0])

        Several steps, with what the codec loses added to the next one:

        >>> wire = Wire(2)
        >>> sites = wire.sites()
        >>> for _ in range(3):
        ...     outcomes = lockstep(codecs.ErrorFeedback(Whole()), [np.array([0.25])] * 2, sites=sites)
        >>> outcomes[0].mean.tolist(), sites[0].cells["residual"].read().tolist(), wire.bytes_sent
        ([1.0], [-0.25], [24, 24])

        What would hang is an error:

        >>> class Forgetful:
        ...     def exchange(self, x, site):
        ...         mean = x
        ...         if site.rank == 0:
        ...             mean = yield AllReduce(x)
        ...         return Outcome(mean)
        >>> lockstep(Forgetful(), [np.zeros(3), np.zeros(3)])
        Traceback (most recent call last):
        hvdplus.errors.ExchangeError: round 1: rank 0 asks for AllReduce of float64 (3,), but rank 1 has finished.
    """
    codec = codecs.make(codec) if isinstance(codec, str) else codec
    places = _numpy_sites(len(inputs)) if sites is None else sites
    if len(places) != len(inputs):
        raise ValueError(f"{len(inputs)} inputs do not fit {len(places)} sites; give one input a rank.")
    drives = [_Drive(codec, site, site.arrays.copy(x)) for site, x in zip(places, inputs, strict=True)]
    number = 0
    while any(drive.outcome is None for drive in drives):
        number += 1
        _refuse_difference(number, drives)
        names = [f"{places[0].name}.{places[0].step}.{number}.{i}" for i in range(len(drives[0].asked))]
        flights = [[d.site.collectives.start(*pair) for pair in zip(d.asked, names, strict=True)] for d in drives]
        for drive, pending in zip(drives, flights, strict=True):
            drive.answer([flight.result() for flight in pending])
    for site in places:
        site.step += 1
        if commit:
            site.commit()
    return [drive.outcome for drive in drives if drive.outcome is not None]


class Wire(Generic[A]):
    """Connects ``size`` ranks of one process.

    It matches requests by order *and* name, so what passes here passes on MPI and on Horovod. As some engines do, it
    writes the answer to an all-reduce or broadcast into the value that was given up.

    Args:
        size: the number of ranks.
        halves: what ``Collectives.sums`` says of float16. Where it says no, half precision may travel as bits only.
        read: turns an array of the framework under test into NumPy's, without a copy where that is possible.
        lend: the way back.

    Example:
        >>> wire = Wire(2)
        >>> def program(collectives):
        ...     return collectives.start(AllReduce(np.array([1.0 + collectives.rank])), "sum").result()
        >>> [answer.tolist() for answer in wire.run(program)]
        [[3.0], [3.0]]
        >>> wire.requests
        ['AllReduce of float64 (1,)']
    """

    def __init__(
        self,
        size: int,
        *,
        halves: bool = True,
        read: Callable[[Any], NumPyArray] = lambda array: array,
        lend: Callable[[NumPyArray], Any] = lambda array: array,
    ) -> None:
        self.size, self.halves = size, halves
        self.ranks = [WireCollectives(self, rank) for rank in range(size)]
        self.bytes_sent = [0] * size
        self._read, self._lend = read, lend
        self._changed = threading.Condition()
        self._slots: list[_Slot[A]] = []
        self._counts = [0] * size
        self._ended: dict[int, str] = {}
        self._fault: str | None = None

    @property
    def requests(self) -> list[str]:
        """What was asked for, in order; equal on all ranks."""
        return [slot.what for slot in self._slots]

    @property
    def names(self) -> list[str]:
        """The names of those requests."""
        return [slot.name for slot in self._slots]

    def sites(self, arrays: Arrays[A] | None = None, name: str = "site") -> list[Site[A]]:
        """Make a site a rank; ``arrays`` of ``None`` are NumPy's."""
        operations: Any = NumPyArrays() if arrays is None else arrays
        return [Site(name, operations, collectives) for collectives in self.ranks]

    def run(self, program: Callable[[WireCollectives[A]], R], seconds: float = 60.0) -> list[R]:
        """Call ``program`` once a rank, each in a thread of its own; return the results in rank order.

        Raises:
            ExchangeError: the ranks ask for different things, one ends while another waits for it, or no end comes.
            Exception: what ``program`` raised on the first rank that failed by itself.
        """
        results: dict[int, R] = {}
        errors: dict[int, Exception] = {}

        def rank(collectives: WireCollectives[A]) -> None:
            try:
                results[collectives.rank] = program(collectives)
                self._end(collectives.rank, "has ended")
            except Exception as error:
                errors[collectives.rank] = error
                self._end(collectives.rank, f"failed with {error!r}")

        self._ended = {}
        threads = [threading.Thread(target=rank, args=(collectives,), daemon=True) for collectives in self.ranks]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if stuck := [i for i, thread in enumerate(threads) if thread.is_alive()]:
            self._blame(f"rank {', '.join(map(str, stuck))} did not end within {seconds:g} s.")
        if errors:
            raise min(errors.items(), key=lambda entry: (isinstance(entry[1], ExchangeError), entry[0]))[1]
        self._refuse_fault()
        return [results[i] for i in range(self.size)]

    # -- what the ranks' ends of the wire call ----------------------------------------------------------------

    def post(self, rank: int, request: Request[A], name: str) -> _Slot[A]:
        """Take in one rank's next request; the last rank's completes it."""
        with self._changed:
            self._refuse_fault()
            what = _describe(request)
            self._check_form(rank, request, what)
            number = self._counts[rank]
            self._counts[rank] += 1
            if number == len(self._slots):
                self._slots.append(_Slot(name, what, rank))
            slot = self._slots[number]
            if (slot.name, slot.what) != (name, what):
                self._blame(
                    f"request {number + 1}: rank {slot.first} asks for {slot.what} named {slot.name!r}, but rank "
                    f"{rank} for {what} named {name!r}."
                )
                self._refuse_fault()
            slot.requests[rank] = request
            self.bytes_sent[rank] += wire_bytes(request, self._read(request.value).nbytes, self.size)
            if len(slot.requests) == self.size:
                slot.answers = self._serve([slot.requests[i] for i in range(self.size)])
                slot.requests.clear()
                self._changed.notify_all()
            return slot

    def is_over(self, slot: _Slot[A]) -> bool:
        """Whether ``await_answer`` would return or raise at once."""
        return slot.answers is not None or self._fault is not None or bool(self._missing(slot))

    def await_answer(self, slot: _Slot[A], rank: int) -> A:
        """Wait for all ranks."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over(slot))
            if slot.answers is not None:
                return slot.answers[rank]
            self._refuse_fault()
            other = self._missing(slot)[0]
            raise ExchangeError(f"rank {rank} waits for {slot.what} named {slot.name!r}, but rank {other} "
                                f"{self._ended[other]}.")  # fmt: skip

    def _missing(self, slot: _Slot[A]) -> list[int]:
        return [rank for rank in sorted(self._ended) if slot.answers is None and rank not in slot.requests]

    def _end(self, rank: int, how: str) -> None:
        with self._changed:
            self._ended[rank] = how
            self._changed.notify_all()

    def _blame(self, fault: str) -> None:
        with self._changed:
            self._fault = self._fault or fault
            self._changed.notify_all()

    def _refuse_fault(self) -> None:
        if self._fault is not None:
            raise ExchangeError(self._fault)

    def _check_form(self, rank: int, request: Request[A], what: str) -> None:
        """Refuse what no engine could serve, or not every one."""
        host = self._read(request.value)
        rows = isinstance(request, AllToAll | ReduceScatter)
        if rows and (host.ndim != 2 or len(host) != self.size):
            raise ExchangeError(f"rank {rank} asks for {what}; its shape must be ({self.size}, n), one row a rank.")
        if host.dtype.itemsize == 2 and host.dtype.kind not in "iu" and not self.halves:
            raise ExchangeError(
                f"rank {rank} asks for {what}, but this wire has no half precision; ask site.collectives.sums first, "
                f"and let the bits travel (Arrays.to_bits)."
            )

    def _serve(self, requests: Sequence[Request[A]]) -> list[A]:
        values = [self._read(request.value) for request in requests]
        first = requests[0]
        if isinstance(first, AllReduce):
            total = _sum(values, first.scale)
            return [self._written(request, total) for request in requests]
        if isinstance(first, Broadcast):
            return [self._written(request, values[first.root].copy()) for request in requests]
        if isinstance(first, ReduceScatter):
            total = _sum(values, first.scale)
            return [self._lend(total[rank].copy()) for rank in range(self.size)]
        if isinstance(first, AllToAll):
            return [self._lend(np.stack([value[rank] for value in values])) for rank in range(self.size)]
        return [self._lend(np.stack(values)) for _ in requests]

    def _written(self, request: Request[A], answer: NumPyArray) -> A:
        host = self._read(request.value)
        if not host.flags.writeable:
            return self._lend(answer.copy())  # type: ignore[no-any-return]
        host[...] = answer
        return request.value


class WireCollectives(Generic[A]):
    """One rank's end of a ``Wire``: a ``hvdplus.collectives.Collectives``."""

    def __init__(self, wire: Wire[A], rank: int) -> None:
        self.wire, self.rank, self.size, self.label = wire, rank, wire.size, "wire"

    def own(self) -> Pending[WireCollectives[A]]:
        """Return itself."""
        return Ready(self)

    def start(self, request: Request[A], name: str) -> _Waiting[A]:
        """Post ``request``."""
        return _Waiting(self.wire, self.wire.post(self.rank, request, name), self.rank)

    def sums(self, value: A, dtype: str) -> bool:
        """Say yes to float32 and float64, no to bfloat16, and to float16 what the wire was told."""
        return dtype != "bfloat16" and (dtype != "float16" or self.wire.halves)


@dataclass
class _Slot(Generic[A]):
    """One collective: what the first rank to come asked for, and who has come."""

    name: str
    what: str
    first: int
    requests: dict[int, Request[A]] = field(default_factory=dict)
    answers: list[A] | None = None


@dataclass(frozen=True)
class _Waiting(Generic[A]):
    """One rank's request on its way."""

    wire: Wire[A]
    slot: _Slot[A]
    rank: int

    def done(self) -> bool:
        """Whether all ranks have come, or never will."""
        return self.wire.is_over(self.slot)

    def result(self) -> A:
        """Return the answer, waiting for it in a thread."""
        return self.wire.await_answer(self.slot, self.rank)


class _Drive(Generic[A]):
    """One rank's codec under way: what it asks for now, or its outcome."""

    def __init__(self, codec: Codec, site: Site[A], x: A) -> None:
        self.site = site
        self.asked: list[Request[A]] = []
        self.outcome: Outcome[A] | None = None
        self._single = True
        self._exchange = codec.exchange(x, site)
        if not isinstance(self._exchange, Generator):
            raise TypeError(f"{type(codec).__name__}.exchange must be a generator: let it yield at least one request.")
        self._advance(None)

    def answer(self, answers: list[A]) -> None:
        """Hand in the answers to what was asked for."""
        self._advance(answers[0] if self._single else answers)

    def _advance(self, answer: Any) -> None:
        self.asked = []
        try:
            asked = self._exchange.send(answer)
        except StopIteration as end:
            if not isinstance(end.value, Outcome):
                raise TypeError(f"rank {self.site.rank}'s codec returned {end.value!r}; return an Outcome.") from None
            self.outcome = end.value
            return
        self._single = not isinstance(asked, Sequence)
        self.asked = [asked] if self._single else list(asked)  # type: ignore[list-item, arg-type]
        for request in self.asked:
            if not isinstance(request, _REQUESTS):
                raise TypeError(f"rank {self.site.rank}'s codec yielded {request!r}; yield an AllReduce or the like.")

    def describe(self) -> str:
        """Say what this rank is at."""
        wants = " and ".join(map(_describe, self.asked)) or "nothing"
        return "has finished" if self.outcome is not None else f"asks for {wants}"


def _refuse_difference(number: int, drives: Sequence[_Drive[A]]) -> None:
    first = drives[0].describe()
    for rank, drive in enumerate(drives):
        if drive.describe() != first:
            raise ExchangeError(f"round {number}: rank 0 {first}, but rank {rank} {drive.describe()}.")


def _describe(request: Request[Any]) -> str:
    value = request.value
    more = ""
    if isinstance(request, AllReduce | ReduceScatter) and request.scale != 1.0:
        more = f" times {request.scale:g}"
    elif isinstance(request, Broadcast):
        more = f" from rank {request.root}"
    dtype = str(value.dtype).rpartition(".")[2]
    return f"{type(request).__name__} of {dtype} {tuple(value.shape)}{more}"


def _sum(values: Sequence[NumPyArray], scale: float) -> NumPyArray:
    with np.errstate(over="ignore", invalid="ignore"):
        total: NumPyArray = values[0] * np.asarray(scale, values[0].dtype)
        for value in values[1:]:
            total = total + value * np.asarray(scale, value.dtype)
    return total


def _numpy_sites(size: int) -> list[Site[Any]]:
    wire: Wire[Any] = Wire(size)
    return wire.sites()
