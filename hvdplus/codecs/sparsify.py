"""The sparsifying codecs: a few of the numbers travel as they are, the others wait in the residual."""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from hvdplus.arrays import NumPyArray
from hvdplus.codecs.contract import Exchange, Outcome, Site
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
        arrays, count, full = site.arrays, site.arrays.count(x), site.arrays.dtype(x)
        if site.rank == 0:
            _say_where_it_ends(self.ratio, site.size)
        x = arrays.cast(x, "float32")
        places = arrays.places_of_largest(x, self.kept(count))
        values = arrays.take(x, places)
        message = [arrays.to_bytes(values), arrays.to_bytes(arrays.cast(places, "int32"))]
        everyone = yield AllGather(arrays.joined(message))
        mean = self._mean(everyone, count, site)
        if not site.keep_sent:
            return Outcome(arrays.cast(mean, full))
        sent = arrays.added_at(arrays.zeros(count, "float32"), places, values)
        return Outcome(arrays.cast(mean, full), arrays.cast(sent, full))

    def _mean(self, everyone: A, count: int, site: Site[A]) -> A:
        """Add up rank by rank: in one go the order of a sum, and so its last bit, could differ between ranks."""
        arrays, k = site.arrays, self.kept(count)
        middle, end = k * _VALUE_BYTES, k * (_VALUE_BYTES + _INDEX_BYTES)
        values = arrays.flat(arrays.from_bytes(arrays.part(everyone, 0, middle), "float32"))
        places = arrays.flat(arrays.cast(arrays.from_bytes(arrays.part(everyone, middle, end), "int32"), "int64"))
        shares = arrays.scaled(values, 1.0 / site.size)
        mean = arrays.zeros(count, "float32")
        for begin in range(0, k * site.size, k):
            mine = arrays.part(places, begin, begin + k), arrays.part(shares, begin, begin + k)
            mean = arrays.added_at(mean, *mine)
        return mean


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
        arrays, count, full = site.arrays, site.arrays.count(x), site.arrays.dtype(x)
        draw = functools.partial(drawn, site.place, count, self.kept(count))
        x = arrays.cast(x, "float32")
        places = arrays.from_host(draw, site.step, self.kept(count), "int64")
        values = arrays.take(x, places)
        # What is not finite may be among those that stay here: 0 times the largest says so to everyone.
        alarm = arrays.scaled(arrays.largest(x), 0.0)
        total = yield AllReduce(arrays.joined([values, alarm]), scale=1.0 / site.size)
        ground = arrays.add(arrays.zeros(count, "float32"), arrays.part(total, self.kept(count), self.kept(count) + 1))
        mean = arrays.cast(arrays.added_at(ground, places, arrays.head(total, self.kept(count))), full)
        if not site.keep_sent:
            return Outcome(mean)
        sent = arrays.added_at(arrays.zeros(count, "float32"), places, values)
        return Outcome(mean, arrays.cast(sent, full))


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
