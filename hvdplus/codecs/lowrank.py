"""The low-rank codec: a matrix travels as two thin ones, which are summed on the wire (Vogels et al. 2019)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, TypeVar

import numpy as np

from hvdplus.arrays import Arrays, Cell, Numbers, NumPyArray, NumPyArrays, Output
from hvdplus.codecs.contract import Exchange, Outcome, Site
from hvdplus.codecs.feedback import kept_before, left_in, stage
from hvdplus.codecs.hashing import hashed
from hvdplus.collectives import AllReduce
from hvdplus.errors import StrategyError

A = TypeVar("A")

_NUMPY = NumPyArrays()


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
    reads_pieces: ClassVar[bool] = True

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

    def limit(self, shape: Sequence[int]) -> str:
        """Say which ranks save anything for an array of this shape.

        Example:
            >>> PowerSGD(64).limit((128, 64)), PowerSGD(1).limit((1, 10))
            ('its rank is 64 and must be at most 42', 'it is no matrix')
        """
        rows, columns = matrix_of(shape)
        most = (rows * columns - 1) // (rows + columns)
        return f"its rank is {self.rank} and must be at most {most}" if most else "it is no matrix"

    def exchange(self, x: A, site: Site[A]) -> Exchange[A]:
        """Average ``x`` over the ranks."""
        return self.with_feedback(x, None, site)

    def with_feedback(self, x: A, residual: Cell[A] | None, site: Site[A]) -> Exchange[A]:
        """Average ``x`` plus the residual, if there is one, and stage what was not sent."""
        arrays, share = site.arrays, 1.0 / site.size
        sizes = [matrix_of(shape) for shape in site.shapes or ((arrays.count(x),),)]
        shape = Shape(self.rank, tuple(sizes))
        state = site.cell("start", sum(map(prod, shape.widths)))
        starts = _renewed(state.read(), self.rank, shape.widths, site)

        whole, left = self._left(x, residual, starts, shape, arrays)
        everyones = yield AllReduce(left, scale=share)
        bases = _strung([_basis(p, self.rank, arrays) for p in _cut(everyones, shape.heights, arrays)], arrays)
        mine, lost = self._right(whole, residual, bases, shape, arrays)
        sent = arrays.cast(_products(bases, mine, shape, arrays), arrays.dtype(x)) if site.keep_sent else None
        right = yield AllReduce(mine, scale=share)

        state.write(arrays.where_finite(right, right, state.read()))
        stage(residual, lost, right, arrays)
        return Outcome(self._mean(bases, right, x, shape, arrays), sent, right)

    def _left(self, x: A, residual: Cell[A] | None, starts: A, shape: Shape, arrays: Arrays[A]) -> tuple[A, A]:
        """Return ``x`` plus the residual, and that times the starts."""
        if arrays.hosts(x):
            outputs = [left_in(x, residual, arrays), Output((sum(map(prod, shape.heights)),))]
            inputs = [x, kept_before(residual, arrays), starts]
            found, left = arrays.on_host(shape.project_left, inputs, outputs)
            return found, left
        whole_x = x if residual is None else arrays.add(x, residual.read())
        matrices = _cut(arrays.cast(whole_x, "float32"), shape.sizes, arrays)
        pairs = zip(_cut(starts, shape.widths, arrays), matrices, strict=True)
        return whole_x, _strung([arrays.matmul(q, arrays.transposed(m)) for q, m in pairs], arrays)

    def _right(self, whole: A, residual: Cell[A] | None, bases: A, shape: Shape, arrays: Arrays[A]) -> tuple[A, A]:
        """Return the bases times ``whole``, which is given up, and what of it that does not hold."""
        if arrays.hosts(whole):
            outputs = [Output((sum(map(prod, shape.widths)),)), Output((arrays.count(whole),), "float32", whole)]
            found, lost = arrays.on_host(shape.project_right, [whole, bases], outputs)
            return found, lost
        matrices = _cut(arrays.cast(whole, "float32"), shape.sizes, arrays)
        pairs = zip(_cut(bases, shape.heights, arrays), matrices, strict=True)
        mine = _strung([arrays.matmul(p, m) for p, m in pairs], arrays)
        if residual is None:
            return mine, whole
        sent = arrays.cast(_products(bases, mine, shape, arrays), arrays.dtype(whole))
        return mine, arrays.subtract(whole, sent)

    def _mean(self, bases: A, right: A, x: A, shape: Shape, arrays: Arrays[A]) -> A:
        """Return the product, in ``x``'s dtype and perhaps its memory."""
        if arrays.hosts(x):
            (mean,) = arrays.on_host(shape.expand, [bases, right], [Output((arrays.count(x),), "float32", x)])
            return mean
        return arrays.cast(_products(bases, right, shape, arrays), arrays.dtype(x))


@dataclass(frozen=True)
class Shape:
    """The matrices of a bucket, ``sizes`` (rows, columns), their low rank, and what is done to them in host memory."""

    rank: int
    sizes: tuple[tuple[int, int], ...]

    @functools.cached_property
    def heights(self) -> list[tuple[int, int]]:
        """The shapes of P."""
        return [(self.rank, rows) for rows, _ in self.sizes]

    @functools.cached_property
    def widths(self) -> list[tuple[int, int]]:
        """The shapes of Q."""
        return [(self.rank, columns) for _, columns in self.sizes]

    def project_left(
        self, x: Numbers, residual: NumPyArray, starts: NumPyArray, whole: NumPyArray, left: NumPyArray
    ) -> None:
        """Write ``x`` plus the residual, and that times the starts."""
        from hvdplus import kernels

        before = (residual, self.sizes if residual.size else [(0, columns) for _, columns in self.sizes])
        given: list[tuple[Numbers, Sequence[tuple[int, int]]]] = [(x, self.sizes), before, (starts, self.widths)]
        for views in self._views(*given, (whole, self.sizes), (left, self.heights)):
            kernels.project_left(*views)

    def project_right(self, whole: NumPyArray, bases: NumPyArray, right: NumPyArray, lost: NumPyArray) -> None:
        """Write the bases times ``whole``, and what of it that does not hold into its memory, which is ``lost``'s."""
        from hvdplus import kernels

        if lost.ctypes.data != whole.ctypes.data:  # memory that may not be written into
            lost[:] = whole
        for p, w, q in self._views((bases, self.heights), (lost, self.sizes), (right, self.widths)):
            kernels.project_right(p, w, q)

    def expand(self, bases: NumPyArray, right: NumPyArray, mean: Numbers) -> None:
        """Write the products."""
        from hvdplus import kernels

        for p, q, m in self._views((bases, self.heights), (right, self.widths), (mean, self.sizes)):
            kernels.expand(p, q, m)

    def _views(self, *arrays: tuple[Numbers, Sequence[tuple[int, int]]]) -> Iterator[tuple[NumPyArray, ...]]:
        """Cut flat arrays into matrices, which pieces are already, and return those that belong together."""
        return zip(
            *(
                _cut(x, shapes, _NUMPY) if isinstance(x, np.ndarray) else map(np.reshape, x, shapes)
                for x, shapes in arrays
            ),
            strict=True,
        )


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


def _products(bases: A, right: A, shape: Shape, arrays: Arrays[A]) -> A:
    """Multiply each basis with its part of ``right``, and put the products behind one another."""
    pairs = zip(_cut(bases, shape.heights, arrays), _cut(right, shape.widths, arrays), strict=True)
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
