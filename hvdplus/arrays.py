"""The few operations a codec needs, the state cell that outlives a step, and the NumPy reference.

Half-precision numbers travel as their bits in int16: NumPy knows no bfloat16, and Horovod refuses it.
Dtypes are named by their NumPy-style names: "float32", "float16", "bfloat16", "float64".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

A = TypeVar("A")

NumPyArray: TypeAlias = npt.NDArray[Any]
Numbers: TypeAlias = NumPyArray | Sequence[NumPyArray]  # in one array, or in pieces behind one another
HostFunction: TypeAlias = Callable[..., None]


class Cell(Generic[A]):
    """A value that outlives a step.

    ``write`` is provisional until ``commit``: a step that is thrown away rolls back and leaves no trace. ``spare`` is
    an array that was the value or would have become it; the next one may be written into it, so who wants to keep
    what ``read`` returns copies it.
    """

    def __init__(self, value: A) -> None:
        self._value = value
        self._staged: A | None = None
        self.spare: A | None = None

    def read(self) -> A:
        """Return the committed value; callers do not write into it."""
        return self._value

    def write(self, value: A) -> None:
        """Stage ``value``."""
        self._staged = value

    @property
    def staged(self) -> A:
        """What would be the value after ``commit``."""
        return self._value if self._staged is None else self._staged

    def commit(self) -> None:
        """Make the staged value the value."""
        if self._staged is not None and self._staged is not self._value:
            self.spare, self._value = self._value, self._staged
        self._staged = None

    def rollback(self) -> None:
        """Drop the staged value."""
        if self._staged is not None and self._staged is not self._value:
            self.spare = self._staged
        self._staged = None


@dataclass(frozen=True)
class Output(Generic[A]):
    """An array that a host function writes: its shape, its dtype, and one whose memory may be taken for it.

    Where that one lies in pieces it is taken for sure.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    into: A | None = None


class Arrays(Protocol[A]):
    """Operations on one-dimensional arrays of one framework (rows: two-dimensional).

    Those from ``padded`` on are what codecs below two bytes are made of. They work on the last axis; ``y`` may be a
    column ``(rows, 1)`` that stands for a whole row. Nothing in them waits for a device.
    """

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
        """Rows, or pieces, behind one another in one dimension."""

    def head(self, x: A, count: int) -> A:
        """The first ``count`` elements."""

    def mean_rows(self, x: A) -> A:
        """The mean over rows, shape ``(n,)``."""

    def sum_rows(self, x: A) -> A:
        """The sum over rows, one after the other, shape ``(n,)``."""

    def to_bits(self, x: A, dtype: str) -> A:
        """``x`` rounded to a 2-byte ``dtype``, its bits as int16."""

    def from_bits(self, x: A, dtype: str, into: str) -> A:
        """Undo ``to_bits`` into dtype ``into``."""

    def padded(self, x: A, size: int) -> A:
        """``x`` (one-dimensional) with zeros behind it up to ``size`` elements."""

    def shaped(self, x: A, shape: tuple[int, ...]) -> A:
        """``x``'s elements in another shape; -1 stands for the length that fits."""

    def part(self, x: A, begin: int, end: int) -> A:
        """The elements from ``begin`` up to ``end`` of the last axis."""

    def joined(self, parts: Sequence[A]) -> A:
        """Arrays of one dtype behind one another on the last axis."""

    def to_bytes(self, x: A) -> A:
        """The memory of ``x`` as uint8, little end first; the last axis grows."""

    def from_bytes(self, x: A, dtype: str) -> A:
        """Undo ``to_bytes``."""

    def shifted(self, x: A, amount: int) -> A:
        """``x + amount`` in ``x``'s dtype."""

    def times(self, x: A, y: A) -> A:
        """``x * y``."""

    def over(self, x: A, y: A) -> A:
        """``x / y``, and 0 where ``y`` is 0."""

    def absolute(self, x: A) -> A:
        """``|x|``."""

    def rounded(self, x: A) -> A:
        """``x`` rounded to whole numbers, ties to even."""

    def limited(self, x: A, most: float) -> A:
        """``x``, and what is larger in size as ``most`` with its sign."""

    def floored(self, x: A) -> A:
        """The largest whole numbers that are not above ``x``."""

    def at_least(self, x: A, y: A) -> A:
        """1 where ``x >= y``, else 0, as uint8; a NaN is not at least anything."""

    def largest(self, x: A) -> A:
        """The largest ``|x|`` of every row, shape ``(rows, 1)`` or ``(1,)``; NaN where there is one."""

    def average(self, x: A) -> A:
        """The mean of every row, as a column; added in float64, so that frameworks round alike."""

    def packed(self, codes: A, bits: int) -> A:
        """Codes (uint8, below ``2**bits``) of 1, 2, 4 or 8 bits, packed into bytes row by row.

        A row's ``m`` bytes hold its first ``m`` codes in their lowest bits, the next ``m`` above those, and so on: in
        such planes codes are packed and unpacked without moving any of them along the row.
        """

    def unpacked(self, x: A, bits: int) -> A:
        """Undo ``packed``."""

    def uniform(self, size: int, seed: int, step: int) -> A:
        """``size`` float32 numbers in [0, 1), the same for the same ``seed`` (32 bits) and ``step`` on one machine."""

    def from_host(self, make: Callable[[int], NumPyArray], step: int, size: int, dtype: str) -> A:
        """``make(step)``, ``size`` numbers of ``dtype`` that Python makes; where steps are traced, anew in each."""

    def take(self, x: A, places: A) -> A:
        """The elements of ``x`` (one-dimensional) at ``places`` (int64)."""

    def added_at(self, x: A, places: A, values: A) -> A:
        """``x``, which is given up, with ``values`` added at ``places``, all of them different."""

    def places_of_largest(self, x: A, count: int) -> A:
        """Where the ``count`` largest ``|x|`` are, as ascending int64; what is not finite comes before all others."""

    def transposed(self, x: A) -> A:
        """Rows as columns."""

    def matmul(self, x: A, y: A) -> A:
        """The product of two matrices."""

    def orthonormal(self, x: A) -> A:
        """Rows that span what those of ``x`` (finite) span, at right angles and of length 1.

        A row that depends on those before it comes out shorter, down to 0: ``y.T @ y`` is never more than a projection.
        """

    def on_host(self, function: HostFunction, inputs: Sequence[A | int], outputs: Sequence[Output[A]]) -> list[A]:
        """Have ``function`` read the inputs and write the outputs, as NumPy arrays in the arrays' own memory.

        It gets a list of them for what lies in pieces. Only where ``hosts`` says so. An output may share its memory
        with an input, which is then given up.
        """

    def hosts(self, x: A) -> bool:
        """Whether a host function is the fastest way to work on ``x``: fp32 in host memory, and numba is there."""


# A number that overflows becomes infinite in silence, as on every device: a step that is not finite is skipped.
quiet = np.errstate(over="ignore", invalid="ignore")


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

    @quiet
    def cast(self, x: NumPyArray, dtype: str) -> NumPyArray:
        """``x`` in ``dtype``."""
        return x.astype(dtype, copy=False)

    @quiet
    def scaled(self, x: NumPyArray, factor: float) -> NumPyArray:
        """``x * factor``."""
        scaled: NumPyArray = x * np.asarray(factor, x.dtype)
        return scaled

    @quiet
    def add(self, x: NumPyArray, y: NumPyArray) -> NumPyArray:
        """``x + y``."""
        return x + y

    @quiet
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

    @quiet
    def mean_rows(self, x: NumPyArray) -> NumPyArray:
        """The mean over rows, each divided before it is added."""
        mean: NumPyArray = np.sum(x * np.asarray(1.0 / len(x), x.dtype), axis=0)
        return mean

    @quiet
    def sum_rows(self, x: NumPyArray) -> NumPyArray:
        """The sum over rows."""
        total: NumPyArray = np.sum(x, axis=0)
        return total

    def to_bits(self, x: NumPyArray, dtype: str) -> NumPyArray:
        """Round to ``dtype`` and show the bits."""
        if dtype == "float16":
            return self.cast(x, dtype).view(np.int16)
        bits = x.astype(np.float32, copy=False).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to nearest, ties to even
        quiet = bits >> 16 | 0x40  # rounding up could turn a NaN into an infinity or into -0
        return np.where(np.isnan(x), quiet, rounded).astype(np.uint16).view(np.int16)

    @quiet
    def from_bits(self, x: NumPyArray, dtype: str, into: str) -> NumPyArray:
        """Read the bits of ``dtype``."""
        if dtype == "float16":
            return x.view(np.float16).astype(into)
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(into)

    def padded(self, x: NumPyArray, size: int) -> NumPyArray:
        """``x`` with zeros behind it."""
        return x if x.size == size else np.pad(x, (0, size - x.size))

    def shaped(self, x: NumPyArray, shape: tuple[int, ...]) -> NumPyArray:
        """``x`` in another shape."""
        return x.reshape(shape)

    def part(self, x: NumPyArray, begin: int, end: int) -> NumPyArray:
        """A part of the last axis."""
        return x[..., begin:end]

    def joined(self, parts: Sequence[NumPyArray]) -> NumPyArray:
        """Arrays behind one another."""
        return np.concatenate(parts, axis=-1)

    def to_bytes(self, x: NumPyArray) -> NumPyArray:
        """The memory as uint8."""
        return np.ascontiguousarray(x).view(np.uint8)

    def from_bytes(self, x: NumPyArray, dtype: str) -> NumPyArray:
        """The memory as ``dtype``."""
        return np.ascontiguousarray(x).view(dtype)

    @quiet
    def shifted(self, x: NumPyArray, amount: int) -> NumPyArray:
        """``x + amount``."""
        shifted: NumPyArray = x + np.asarray(amount, x.dtype)
        return shifted

    @quiet
    def times(self, x: NumPyArray, y: NumPyArray) -> NumPyArray:
        """``x * y``."""
        product: NumPyArray = x * y
        return product

    @quiet
    def over(self, x: NumPyArray, y: NumPyArray) -> NumPyArray:
        """``x / y``; what is divided by infinity is 0."""
        quotient: NumPyArray = x / np.where(y == 0, np.asarray(np.inf, y.dtype), y)
        return quotient

    def absolute(self, x: NumPyArray) -> NumPyArray:
        """``|x|``."""
        return np.abs(x)

    @quiet
    def rounded(self, x: NumPyArray) -> NumPyArray:
        """To whole numbers, ties to even."""
        return np.rint(x)

    @quiet
    def limited(self, x: NumPyArray, most: float) -> NumPyArray:
        """``x`` between two numbers."""
        limited: NumPyArray = np.clip(x, np.asarray(-most, x.dtype), np.asarray(most, x.dtype))
        return limited

    @quiet
    def floored(self, x: NumPyArray) -> NumPyArray:
        """Down to whole numbers."""
        return np.floor(x)

    @quiet
    def at_least(self, x: NumPyArray, y: NumPyArray) -> NumPyArray:
        """1 where ``x >= y``."""
        return np.greater_equal(x, y).view(np.uint8)

    def largest(self, x: NumPyArray) -> NumPyArray:
        """The largest ``|x|`` of every row."""
        largest: NumPyArray = np.max(np.abs(x), axis=-1, keepdims=True)
        return largest

    @quiet
    def average(self, x: NumPyArray) -> NumPyArray:
        """The mean of every row."""
        return np.mean(x, axis=-1, keepdims=True, dtype=np.float64).astype(x.dtype)

    def packed(self, codes: NumPyArray, bits: int) -> NumPyArray:
        """Codes packed into bytes."""
        planes = codes.reshape(*codes.shape[:-1], 8 // bits, -1)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        joined: NumPyArray = np.bitwise_or.reduce(planes << shifts, axis=-2)
        return joined

    def unpacked(self, x: NumPyArray, bits: int) -> NumPyArray:
        """Bytes taken apart into codes."""
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        planes: NumPyArray = x[..., None, :] >> shifts & np.uint8(2**bits - 1)
        return planes.reshape(*x.shape[:-1], -1)

    def uniform(self, size: int, seed: int, step: int) -> NumPyArray:
        """Numbers in [0, 1)."""
        return np.random.Generator(np.random.Philox(key=[seed, step])).random(size, np.float32)

    def from_host(self, make: Callable[[int], NumPyArray], step: int, size: int, dtype: str) -> NumPyArray:
        """What Python makes."""
        return make(step).astype(dtype, copy=False)

    def take(self, x: NumPyArray, places: NumPyArray) -> NumPyArray:
        """Some elements."""
        return x[places]

    @quiet
    def added_at(self, x: NumPyArray, places: NumPyArray, values: NumPyArray) -> NumPyArray:
        """``x`` with values added."""
        x[places] += values
        return x

    @quiet
    def places_of_largest(self, x: NumPyArray, count: int) -> NumPyArray:
        """Where the largest ones are; of equal ones the first."""
        size = np.where(np.isnan(x), np.asarray(np.inf, x.dtype), np.abs(x))
        candidates = np.flatnonzero(size >= _threshold(size, count))
        if candidates.size < count:  # the sample was not like the rest
            candidates = np.arange(size.size)
        size = size[candidates]
        least = np.partition(size, -count)[-count]
        above, level = np.flatnonzero(size > least), np.flatnonzero(size == least)
        found: NumPyArray = candidates[np.sort(np.concatenate([above, level[: count - above.size]]))]
        return found

    def transposed(self, x: NumPyArray) -> NumPyArray:
        """Rows as columns."""
        return x.T

    @quiet
    def matmul(self, x: NumPyArray, y: NumPyArray) -> NumPyArray:
        """The product of two matrices."""
        product: NumPyArray = x @ y
        return product

    def orthonormal(self, x: NumPyArray) -> NumPyArray:
        """Rows of length 1, times the inverse of the Cholesky factor of their products; that one is never singular."""
        rows = self.over(x, self.largest(x)).astype(np.float64)  # first, so that no square overflows
        rows = self.over(rows, np.sqrt(np.sum(rows * rows, axis=-1, keepdims=True)))
        products = rows @ rows.T + RIDGE * np.eye(len(rows))
        rows = np.linalg.solve(np.linalg.cholesky(products), rows)
        return rows.astype(x.dtype)

    def on_host(
        self,
        function: HostFunction,
        inputs: Sequence[NumPyArray | int],
        outputs: Sequence[Output[NumPyArray]],
    ) -> list[NumPyArray]:
        """Call it."""
        written = [np.empty(o.shape, o.dtype) if o.into is None else o.into for o in outputs]
        function(*inputs, *written)
        return written

    def hosts(self, x: NumPyArray) -> bool:
        """Return False: this is what host functions are held against."""
        return False


def _threshold(size: NumPyArray, count: int) -> Any:
    """Guess from a sample a number that rather more than ``count`` are not below."""
    stride = size.size // SAMPLE
    wanted = sample_rank(size.size, count)
    if stride < 2 or not wanted:
        return 0
    sample = size[::stride]
    return np.partition(sample, -wanted)[-wanted]


SAMPLE = 2**16  # of so many numbers a threshold is guessed
RIDGE = 1e-12  # float64 keeps a Cholesky factor this far from singular


def sample_rank(size: int, count: int) -> int:
    """Return which of the largest of a sample to take as a threshold; 0 where a guess would not help.

    A third more than wanted, and four standard deviations for a small number, so that a miss is rare.
    """
    expected = count * (size // (size // SAMPLE)) / size if size >= SAMPLE else 0.0
    wanted = int(1.3 * expected + 4 * expected**0.5 + 4)
    return wanted if expected > 0 and wanted < SAMPLE // 2 else 0
