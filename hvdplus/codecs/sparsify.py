"""The sparsifying codecs: a few of the numbers travel as they are, the others wait in the residual."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from hvdplus.arrays import Arrays, Cell, NumPyArray, Output
from hvdplus.codecs.contract import Exchange, Outcome, Site
from hvdplus.codecs.feedback import kept_before, left_in, stage
from hvdplus.codecs.hashing import hashed
from hvdplus.collectives import AllGather, AllReduce
from hvdplus.errors import StrategyError

A = TypeVar("A")

log = logging.getLogger("hvdplus")

_INDEX_BYTES = _VALUE_BYTES = 4


@dataclass(frozen=True)
class Sparse:
    """What the codecs here share: ``ratio`` of a bucket's numbers, at least one, travel."""

    ratio: float
    lossy: ClassVar[bool] = True
    reads_pieces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number = isinstance(self.ratio, int | float) and not isinstance(self.ratio, bool)
        if not number or not 0 < self.ratio <= 1:
            raise StrategyError(
                f"ratio={self.ratio!r} must be above 0 and at most 1, such as 0.01 for one in a hundred."
            )

    def kept(self, count: int) -> int:
        """How many of ``count`` numbers travel; the same on all ranks.

        Example:
            >>> Sparse(0.01).kept(250), Sparse(0.01).kept(7)
            (3, 1)
        """
        return min(math.ceil(self.ratio * count), count)


@dataclass(frozen=True)
class TopK(Sparse):
    """The numbers that are largest in size, each rank's own, with their places; 8 bytes for each (Aji & Heafield 2017).

    Ranks keep different places, so every rank's message goes to every other one: the bytes grow with the ranks.
    """

    def exchange(self, x: A, site: Site[A]) -> Exchange[A]:
        """Average ``x`` over the ranks."""
        return self.with_feedback(x, None, site)

    def with_feedback(self, x: A, residual: Cell[A] | None, site: Site[A]) -> Exchange[A]:
        """Average ``x`` plus the residual, if there is one, and stage what was not sent."""
        if site.rank == 0:
            _say_where_it_ends(self.ratio, site.size)
        message, lost = self._encoded(x, residual, site.arrays)
        sent = self._sent(message, x, site.arrays) if site.keep_sent else None
        everyone = yield AllGather(message)
        mean, alarm = self._mean(everyone, x, site)
        stage(residual, lost, alarm, site.arrays)
        return Outcome(mean, sent, alarm)

    def _encoded(self, x: A, residual: Cell[A] | None, arrays: Arrays[A]) -> tuple[A, A]:
        """Return values and places in one message, and what is left of ``x`` plus the residual."""
        k = self.kept(arrays.count(x))
        if arrays.hosts(x):
            from hvdplus import kernels

            encode = functools.partial(kernels.encode_largest, kept=k)
            outputs = [Output((k * (_VALUE_BYTES + _INDEX_BYTES),), "uint8"), left_in(x, residual, arrays)]
            message, lost = arrays.on_host(encode, [x, kept_before(residual, arrays)], outputs)
            return message, lost
        whole = x if residual is None else arrays.add(x, residual.read())
        numbers = arrays.cast(whole, "float32")
        places = arrays.places_of_largest(numbers, k)
        values = arrays.take(numbers, places)
        message = arrays.joined([arrays.to_bytes(values), arrays.to_bytes(arrays.cast(places, "int32"))])
        return message, without(whole, places, values, residual, arrays)

    def _read(self, messages: A, k: int, arrays: Arrays[A]) -> tuple[A, A]:
        """Return the values and places of messages, behind one another."""
        middle, end = k * _VALUE_BYTES, k * (_VALUE_BYTES + _INDEX_BYTES)
        values = arrays.flat(arrays.from_bytes(arrays.part(messages, 0, middle), "float32"))
        places = arrays.flat(arrays.from_bytes(arrays.part(messages, middle, end), "int32"))
        return values, arrays.cast(places, "int64")

    def _sent(self, message: A, x: A, arrays: Arrays[A]) -> A:
        values, places = self._read(message, self.kept(arrays.count(x)), arrays)
        sent = arrays.added_at(arrays.zeros(arrays.count(x), "float32"), places, values)
        return arrays.cast(sent, arrays.dtype(x))

    def _mean(self, everyone: A, x: A, site: Site[A]) -> tuple[A, A]:
        """Add up rank by rank: in one go the order of a sum, and so its last bit, could differ between ranks."""
        arrays, count = site.arrays, site.arrays.count(x)
        if arrays.hosts(x):
            from hvdplus import kernels

            outputs = [Output((count,), "float32", x), Output((1,))]
            mean, alarm = arrays.on_host(kernels.mean_of_largest, [everyone], outputs)
            return mean, alarm
        k = self.kept(count)
        values, places = self._read(everyone, k, arrays)
        shares = arrays.scaled(values, 1.0 / site.size)
        mean = arrays.zeros(count, "float32")
        for begin in range(0, k * site.size, k):
            mine = arrays.part(places, begin, begin + k), arrays.part(shares, begin, begin + k)
            mean = arrays.added_at(mean, *mine)
        return arrays.cast(mean, arrays.dtype(x)), arrays.scaled(values, 0.0)


@functools.cache
def _say_where_it_ends(ratio: float, size: int) -> None:
    """Log once where gathering 8 bytes for each kept number costs more than summing 2 or 4 for every number."""
    fp16, exact = math.ceil(0.5 / ratio), math.ceil(1 / ratio)
    log.log(
        logging.WARNING if size >= fp16 else logging.INFO,
        "hvdplus: topk:%g sends what it keeps to every rank: fewer bytes than fp16 below %d ranks, than exact below "
        "%d; here are %d.",
        ratio, fp16, exact, size,
    )  # fmt: skip


@dataclass(frozen=True)
class RandomK(Sparse):
    """Numbers at places that all ranks draw alike, so that their values can be summed on the wire; 4 bytes for each.

    A bucket is cut into as many equal parts as numbers travel, and one place is drawn in each: no place comes twice,
    every number has the same chance, and they are read in order. What is drawn follows from the bucket's place in the
    plan and the step, whatever the framework or its random state.
    """

    def exchange(self, x: A, site: Site[A]) -> Exchange[A]:
        """Average ``x`` over the ranks."""
        return self.with_feedback(x, None, site)

    def with_feedback(self, x: A, residual: Cell[A] | None, site: Site[A]) -> Exchange[A]:
        """Average ``x`` plus the residual, if there is one, and stage what was not sent."""
        arrays, count = site.arrays, site.arrays.count(x)
        draw = functools.partial(drawn, site.place, count, self.kept(count))
        message, lost, places = self._encoded(x, residual, draw, site)
        sent = self._spread(message, places, x, arrays)[0] if site.keep_sent else None
        total = yield AllReduce(message, scale=1.0 / site.size)
        mean, alarm = self._spread(total, places, x, arrays, given_up=True)
        stage(residual, lost, alarm, arrays)
        return Outcome(mean, sent, alarm)

    def _encoded(
        self, x: A, residual: Cell[A] | None, draw: Callable[[int], NumPyArray], site: Site[A]
    ) -> tuple[A, A, A]:
        """Return the values, what is left of ``x`` plus the residual, and the places.

        What is not finite may be among the numbers that stay here: behind the values 0 times the largest says so to
        everyone.
        """
        arrays, k = site.arrays, self.kept(site.arrays.count(x))
        if arrays.hosts(x):
            from hvdplus import kernels

            outputs = [Output((k + 1,)), left_in(x, residual, arrays), Output((k,), "int32")]
            inputs: list[A | int] = [x, kept_before(residual, arrays), site.step]
            message, lost, drawn_places = arrays.on_host(
                functools.partial(kernels.encode_drawn, draw=draw), inputs, outputs
            )
            return message, lost, drawn_places
        whole = x if residual is None else arrays.add(x, residual.read())
        numbers = arrays.cast(whole, "float32")
        places = arrays.from_host(draw, site.step, k, "int64")
        values = arrays.take(numbers, places)
        message = arrays.joined([values, arrays.scaled(arrays.largest(numbers), 0.0)])
        return message, without(whole, places, values, residual, arrays), places

    def _spread(self, message: A, places: A, x: A, arrays: Arrays[A], given_up: bool = False) -> tuple[A, A]:
        """Return all numbers of a message, and whether they are finite."""
        count, k = arrays.count(x), self.kept(arrays.count(x))
        if arrays.hosts(x):
            from hvdplus import kernels

            outputs = [Output((count,), "float32", x if given_up else None), Output((1,))]
            mean, alarm = arrays.on_host(kernels.spread_drawn, [message, places], outputs)
            return mean, alarm
        ground = arrays.add(arrays.zeros(count, "float32"), arrays.part(message, k, k + 1))
        spread = arrays.added_at(ground, places, arrays.head(message, k))
        return arrays.cast(spread, arrays.dtype(x)), arrays.scaled(message, 0.0)


def without(whole: A, places: A, values: A, residual: Cell[A] | None, arrays: Arrays[A]) -> A:
    """Return ``whole`` without ``values`` at ``places``; nobody asks for it where there is no residual."""
    if residual is None:
        return whole
    taken = arrays.added_at(arrays.zeros(arrays.count(whole), "float32"), places, values)
    return arrays.subtract(whole, arrays.cast(taken, arrays.dtype(whole)))


def drawn(place: int, count: int, kept: int, step: int) -> NumPyArray:
    """Draw ``kept`` of ``count`` places, one in each of ``kept`` parts; int64, ascending.

    Example:
        >>> drawn(0, 10, 5, step=0).tolist() == drawn(0, 10, 5, step=0).tolist()
        True
    """
    parts = np.arange(kept + 1, dtype=np.int64) * count // kept
    length = np.diff(parts).astype(np.uint64)
    chance = hashed(kept, place, int(step)) >> np.uint64(32)
    return parts[:-1] + (chance * length >> np.uint64(32)).astype(np.int64)
