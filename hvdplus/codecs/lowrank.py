"""The low-rank codec: a matrix travels as two thin ones, which are summed on the wire (Vogels et al. 2019)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, TypeVar

import numpy as np

from hvdplus.arrays import Arrays, NumPyArray
from hvdplus.codecs.contract import Exchange, Outcome, Site
from hvdplus.codecs.hashing import hashed
from hvdplus.collectives import AllReduce
from hvdplus.errors import StrategyError

A = TypeVar("A")


@dataclass(frozen=True)
class PowerSGD:
    """One step of power iteration a step of training, from where the last one ended (Vogels et al. 2019).

    With M a rank's ``(rows, columns)`` matrix: P, ``rank`` vectors of ``rows``, is M times the last step's Q; P is
    averaged over the ranks and made orthonormal; Q, ``rank`` vectors of ``columns``, is P times M and is averaged too.
    The mean is then P times Q, and what this rank sent is P times its own Q, so the mean of M's projections is the
    projection of their mean. A bucket's matrices travel together, two all-reduces of ``4 * rank * (rows + columns)``
    bytes; vectors are laid out as rows here.
    """

    rank: int
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise StrategyError(f"rank={self.rank!r} must be a whole number of at least 1, such as 4.")

    def serves(self, shape: Sequence[int]) -> bool:
        """Whether an array of this shape is a matrix that has a lower rank's worth to save; else it travels exact.

        Example:
            >>> PowerSGD(4).serves((128, 64)), PowerSGD(4).serves((128,)), PowerSGD(64).serves((128, 64))
            (True, False, False)
        """
        rows, columns = matrix_of(shape)
        return self.rank * (rows + columns) < rows * columns

    def exchange(self, x: A, site: Site[A]) -> Exchange[A]:
        """Average ``x`` over the ranks."""
        arrays, full, share = site.arrays, site.arrays.dtype(x), 1.0 / site.size
        sizes = [matrix_of(shape) for shape in site.shapes or ((arrays.count(x),),)]
        matrices = _cut(arrays.cast(x, "float32"), sizes, arrays)
        heights, widths = [(self.rank, rows) for rows, _ in sizes], [(self.rank, columns) for _, columns in sizes]
        state = site.cell("start", sum(map(prod, widths)))

        starts = _cut(_renewed(state.read(), self.rank, widths, site), widths, arrays)
        left = [arrays.matmul(q, arrays.transposed(m)) for q, m in zip(starts, matrices, strict=True)]
        everyones = yield AllReduce(_strung(left, arrays), scale=share)
        bases = [_basis(p, self.rank, arrays) for p in _cut(everyones, heights, arrays)]
        mine = _strung([arrays.matmul(p, m) for p, m in zip(bases, matrices, strict=True)], arrays)
        sent = _products(bases, mine, widths, arrays) if site.keep_sent else None
        right = yield AllReduce(mine, scale=share)

        state.write(arrays.where_finite(right, right, state.read()))
        mean = arrays.cast(_products(bases, right, widths, arrays), full)
        return Outcome(mean, None if sent is None else arrays.cast(sent, full))


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of the matrix that an array of ``shape`` is: cut where it comes out most square.

    Example:
        >>> matrix_of((64, 32, 3, 3)), matrix_of((3, 3, 32, 64)), matrix_of((10,)), matrix_of(())
        ((64, 288), (288, 64), (1, 10), (1, 1))
    """
    cuts = [(prod(shape[:i]), prod(shape[i:])) for i in range(max(len(shape), 1))]
    return min(cuts, key=sum)


def _cut(x: A, sizes: Sequence[tuple[int, int]], arrays: Arrays[A]) -> list[A]:
    """Cut ``x`` into matrices of ``sizes``."""
    found, begin = [], 0
    for size in sizes:
        found.append(arrays.shaped(arrays.part(x, begin, begin + prod(size)), size))
        begin += prod(size)
    return found


def _strung(matrices: Sequence[A], arrays: Arrays[A]) -> A:
    """Put matrices behind one another."""
    return arrays.joined([arrays.flat(matrix) for matrix in matrices])


def _products(bases: Sequence[A], right: A, widths: Sequence[tuple[int, int]], arrays: Arrays[A]) -> A:
    """Multiply each basis with its part of ``right``, and put the products behind one another."""
    pairs = zip(bases, _cut(right, widths, arrays), strict=True)
    return _strung([arrays.matmul(arrays.transposed(p), q) for p, q in pairs], arrays)


def _basis(vectors: A, rank: int, arrays: Arrays[A]) -> A:
    """Make vectors orthonormal; where any number is not finite, none of the result is."""
    flat = arrays.flat(vectors)
    finite = arrays.where_finite(flat, flat, arrays.zeros(arrays.count(flat), "float32"))
    nothing = arrays.scaled(arrays.largest(flat), 0.0)  # 0, or NaN
    return arrays.add(arrays.orthonormal(arrays.shaped(finite, (rank, -1))), nothing)


def _renewed(state: A, rank: int, widths: Sequence[tuple[int, int]], site: Site[A]) -> A:
    """Give vectors that are 0 a random direction: at the start, and where a matrix had a lower rank for a while.

    They would stay 0 for ever. State is equal on all ranks, and so are these numbers.
    """
    arrays, size = site.arrays, sum(map(prod, widths))
    fresh = arrays.from_host(functools.partial(_directions, site.place, size), 0, size, "float32")
    vectors = zip(_cut(state, widths, arrays), _cut(fresh, widths, arrays), strict=True)
    return _strung([_filled(old, new, arrays) for old, new in vectors], arrays)


def _filled(old: A, new: A, arrays: Arrays[A]) -> A:
    """Bring rows of ``old`` to size 1, so that products neither overflow nor vanish; for those of 0 take ``new``'s."""
    largest = arrays.largest(old)
    lost = arrays.cast(arrays.at_least(arrays.zeros(1, "float32"), largest), "float32")
    return arrays.add(arrays.over(old, largest), arrays.times(new, lost))


@functools.lru_cache(maxsize=256)
def _directions(place: int, size: int, step: int) -> NumPyArray:
    """Return ``size`` numbers in [-1, 1)."""
    return ((hashed(size, place, step) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - 1).astype(
        np.float32
    )
