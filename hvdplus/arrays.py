"""The few operations a codec needs, the state cell that outlives a step, and the NumPy reference.

Half-precision numbers travel as their bits in int16: NumPy knows no bfloat16, and Horovod refuses it.
Dtypes are named by their NumPy-style names: "float32", "float16", "bfloat16", "float64".
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

A = TypeVar("A")

NumPyArray: TypeAlias = npt.NDArray[Any]


class Cell(Generic[A]):
    """A value that outlives a step.

    ``write`` is provisional until ``commit``: a step that is thrown away rolls back and leaves no trace.
    """

    def __init__(self, value: A) -> None:
        self._value = value
        self._staged: A | None = None

    def read(self) -> A:
        """Return the committed value; callers do not write into it."""
        return self._value

    def write(self, value: A) -> None:
        """Stage ``value``."""
        self._staged = value

    def commit(self) -> None:
        """Make the staged value the value."""
        if self._staged is not None:
            self._value, self._staged = self._staged, None

    def rollback(self) -> None:
        """Drop the staged value."""
        self._staged = None


class Arrays(Protocol[A]):
    """Operations on one-dimensional arrays of one framework (rows: two-dimensional)."""

    def zeros(self, size: int, dtype: str) -> A:
        """``size`` zeros."""

    def dtype(self, x: A) -> str:
        """The name of the dtype."""

    def count(self, x: A) -> int:
        """The number of elements."""

    def nbytes(self, x: A) -> int:
        """The number of bytes."""

    def copy(self, x: A) -> A:
        """A new array with the same values."""

    def cast(self, x: A, dtype: str) -> A:
        """``x`` in ``dtype``, rounded to nearest even; ``x`` itself where that is its dtype."""

    def scaled(self, x: A, factor: float) -> A:
        """``x * factor`` in ``x``'s dtype."""

    def add(self, x: A, y: A) -> A:
        """``x + y``."""

    def subtract(self, x: A, y: A) -> A:
        """``x - y``."""

    def norm(self, x: A) -> float:
        """The Euclidean norm."""

    def all_finite(self, x: A) -> bool:
        """Whether no element is infinite or NaN."""

    def where_finite(self, condition: A, then: A, otherwise: A) -> A:
        """``then`` if all of ``condition`` is finite, else ``otherwise``."""

    def rows(self, x: A, count: int) -> A:
        """``x`` padded with zeros at the end and cut into ``count`` equal rows."""

    def flat(self, x: A) -> A:
        """Rows behind one another in one dimension."""

    def head(self, x: A, count: int) -> A:
        """The first ``count`` elements."""

    def mean_rows(self, x: A) -> A:
        """The mean over rows, shape ``(n,)``."""

    def to_bits(self, x: A, dtype: str) -> A:
        """``x`` rounded to a 2-byte ``dtype``, its bits as int16."""

    def from_bits(self, x: A, dtype: str, into: str) -> A:
        """Undo ``to_bits`` into dtype ``into``."""


# A number that overflows becomes infinite in silence, as on every device: a step that is not finite is skipped.
_quiet = np.errstate(over="ignore", invalid="ignore")


class NumPyArrays:
    """The reference: plain NumPy, written to be read."""

    def zeros(self, size: int, dtype: str) -> NumPyArray:
        """``size`` zeros."""
        return np.zeros(size, dtype)

    def dtype(self, x: NumPyArray) -> str:
        """The name of the dtype."""
        return x.dtype.name

    def count(self, x: NumPyArray) -> int:
        """The number of elements."""
        return x.size

    def nbytes(self, x: NumPyArray) -> int:
        """The number of bytes."""
        return x.nbytes

    def copy(self, x: NumPyArray) -> NumPyArray:
        """A new array with the same values."""
        return x.copy()

    @_quiet
    def cast(self, x: NumPyArray, dtype: str) -> NumPyArray:
        """``x`` in ``dtype``."""
        return x.astype(dtype, copy=False)

    @_quiet
    def scaled(self, x: NumPyArray, factor: float) -> NumPyArray:
        """``x * factor``."""
        scaled: NumPyArray = x * np.asarray(factor, x.dtype)
        return scaled

    @_quiet
    def add(self, x: NumPyArray, y: NumPyArray) -> NumPyArray:
        """``x + y``."""
        return x + y

    @_quiet
    def subtract(self, x: NumPyArray, y: NumPyArray) -> NumPyArray:
        """``x - y``."""
        return x - y

    def norm(self, x: NumPyArray) -> float:
        """The Euclidean norm."""
        return float(np.linalg.norm(x.astype(np.float64)))

    def all_finite(self, x: NumPyArray) -> bool:
        """Whether no element is infinite or NaN."""
        return bool(np.isfinite(x).all())

    def where_finite(self, condition: NumPyArray, then: NumPyArray, otherwise: NumPyArray) -> NumPyArray:
        """``then`` if all of ``condition`` is finite, else ``otherwise``."""
        return then if self.all_finite(condition) else otherwise

    def rows(self, x: NumPyArray, count: int) -> NumPyArray:
        """``x`` padded with zeros and cut into ``count`` equal rows."""
        return np.pad(x, (0, -x.size % count)).reshape(count, -1)

    def flat(self, x: NumPyArray) -> NumPyArray:
        """Rows behind one another."""
        return x.reshape(-1)

    def head(self, x: NumPyArray, count: int) -> NumPyArray:
        """The first ``count`` elements."""
        return x[:count]

    @_quiet
    def mean_rows(self, x: NumPyArray) -> NumPyArray:
        """The mean over rows, each divided before it is added."""
        mean: NumPyArray = np.sum(x * np.asarray(1.0 / len(x), x.dtype), axis=0)
        return mean

    def to_bits(self, x: NumPyArray, dtype: str) -> NumPyArray:
        """Round to ``dtype`` and show the bits."""
        if dtype == "float16":
            return self.cast(x, dtype).view(np.int16)
        bits = x.astype(np.float32, copy=False).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to nearest, ties to even
        quiet = bits >> 16 | 0x40  # rounding up could turn a NaN into an infinity or into -0
        return np.where(np.isnan(x), quiet, rounded).astype(np.uint16).view(np.int16)

    @_quiet
    def from_bits(self, x: NumPyArray, dtype: str, into: str) -> NumPyArray:
        """Read the bits of ``dtype``."""
        if dtype == "float16":
            return x.view(np.float16).astype(into)
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(into)
