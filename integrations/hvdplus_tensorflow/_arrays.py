"""The array operations of a codec, on TensorFlow tensors: eager ones, and those of a graph that is being traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvdplus.arrays import RIDGE, HostFunction, NumPyArray, Output
from hvdplus.memory import Pool

Tensor: TypeAlias = Any  # tf.Tensor, eager or symbolic; TensorFlow ships no types

_TILE = 2**15  # numbers that stay in a cache as fp64


class TensorFlowArrays:
    """``hvdplus.arrays.Arrays`` for tensors of static shape. In a graph the answers of ``norm`` and ``all_finite``
    are symbolic.
    """

    def __init__(self) -> None:
        self._pool = Pool()

    def zeros(self, size: int, dtype: str) -> Tensor:
        """``size`` zeros."""
        return tf.zeros([size], dtype)

    def dtype(self, x: Tensor) -> str:
        """The name of the dtype."""
        return str(x.dtype.name)

    def count(self, x: Tensor) -> int:
        """The number of elements."""
        return int(x.shape.num_elements())

    def nbytes(self, x: Tensor) -> int:
        """The number of bytes."""
        return self.count(x) * int(x.dtype.size)

    def copy(self, x: Tensor) -> Tensor:
        """The tensor itself: nothing writes into tensors here."""
        return x

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """``x`` in ``dtype``."""
        return tf.cast(x, dtype)

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        """``x * factor``."""
        return x * tf.constant(factor, x.dtype)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """``x + y``."""
        return x + y

    def subtract(self, x: Tensor, y: Tensor) -> Tensor:
        """``x - y``."""
        return x - y

    def norm(self, x: Tensor) -> Tensor:
        """The Euclidean norm."""
        if tf.executing_eagerly():
            return float(tf.norm(tf.cast(x, tf.float64)))
        if not self.hosts(x):
            return tf.norm(tf.cast(x, tf.float64))
        (norm,) = self.on_host(_write_norm, [x], [Output((), "float64")])
        return norm

    def all_finite(self, x: Tensor) -> Tensor:
        """Whether no element is infinite or NaN."""
        return tf.reduce_all(tf.math.is_finite(x))

    def where_finite(self, condition: Tensor, then: Tensor, otherwise: Tensor) -> Tensor:
        """``then`` if all of ``condition`` is finite, else ``otherwise``."""
        return tf.cond(self.all_finite(condition), lambda: then, lambda: otherwise)  # tf.where would copy

    def rows(self, x: Tensor, count: int) -> Tensor:
        """``x`` padded with zeros at the end and cut into ``count`` equal rows."""
        return tf.reshape(tf.pad(x, [[0, -self.count(x) % count]]), [count, -1])

    def flat(self, x: Tensor) -> Tensor:
        """Rows behind one another."""
        return tf.reshape(x, [-1])

    def head(self, x: Tensor, count: int) -> Tensor:
        """The first ``count`` elements."""
        return x[:count]

    def mean_rows(self, x: Tensor) -> Tensor:
        """The mean over rows, each divided before it is added."""
        return tf.reduce_sum(self.scaled(x, 1.0 / x.shape[0]), axis=0)

    def sum_rows(self, x: Tensor) -> Tensor:
        """The sum over rows."""
        return tf.reduce_sum(x, axis=0)

    def to_bits(self, x: Tensor, dtype: str) -> Tensor:
        """Round to a 2-byte ``dtype`` and show the bits."""
        return tf.bitcast(tf.cast(x, dtype), tf.int16)

    def from_bits(self, x: Tensor, dtype: str, into: str) -> Tensor:
        """Read the bits of ``dtype``."""
        if dtype == "bfloat16":  # a shift, because TensorFlow's cast takes subnormal numbers for 0
            whole = tf.bitwise.left_shift(tf.cast(tf.bitcast(x, tf.uint16), tf.uint32), tf.constant(16, tf.uint32))
            return tf.cast(tf.bitcast(whole, tf.float32), into)
        return tf.cast(tf.bitcast(x, dtype), into)

    def padded(self, x: Tensor, size: int) -> Tensor:
        """``x`` with zeros behind it."""
        return x if self.count(x) == size else tf.pad(x, [[0, size - self.count(x)]])

    def shaped(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """``x`` in another shape."""
        return tf.reshape(x, shape)

    def part(self, x: Tensor, begin: int, end: int) -> Tensor:
        """A part of the last axis."""
        return x[..., begin:end]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors behind one another."""
        return tf.concat(list(parts), axis=-1)

    def to_bytes(self, x: Tensor) -> Tensor:
        """The memory as uint8."""
        return tf.reshape(tf.bitcast(x, tf.uint8), [*x.shape[:-1], x.shape[-1] * x.dtype.size])

    def from_bytes(self, x: Tensor, dtype: str) -> Tensor:
        """The memory as ``dtype``."""
        each = tf.as_dtype(dtype).size
        return tf.bitcast(tf.reshape(x, [*x.shape[:-1], x.shape[-1] // each, each]), dtype)

    def shifted(self, x: Tensor, amount: int) -> Tensor:
        """``x + amount``."""
        return x + tf.constant(amount, x.dtype)

    def times(self, x: Tensor, y: Tensor) -> Tensor:
        """``x * y``."""
        return x * y

    def over(self, x: Tensor, y: Tensor) -> Tensor:
        """``x / y``; what is divided by infinity is 0."""
        return x / tf.where(tf.equal(y, 0), tf.constant(np.inf, y.dtype), y)

    def absolute(self, x: Tensor) -> Tensor:
        """``|x|``."""
        return tf.abs(x)

    def rounded(self, x: Tensor) -> Tensor:
        """To whole numbers, ties to even."""
        return tf.round(x)

    def limited(self, x: Tensor, most: float) -> Tensor:
        """``x`` between two numbers."""
        return tf.clip_by_value(x, tf.constant(-most, x.dtype), tf.constant(most, x.dtype))

    def floored(self, x: Tensor) -> Tensor:
        """Down to whole numbers."""
        return tf.floor(x)

    def at_least(self, x: Tensor, y: Tensor) -> Tensor:
        """1 where ``x >= y``."""
        return tf.cast(tf.greater_equal(x, y), tf.uint8)

    def largest(self, x: Tensor) -> Tensor:
        """The largest ``|x|`` of every row."""
        return tf.reduce_max(tf.abs(x), axis=-1, keepdims=True)

    def average(self, x: Tensor) -> Tensor:
        """The mean of every row."""
        return tf.cast(tf.reduce_mean(tf.cast(x, tf.float64), axis=-1, keepdims=True), x.dtype)

    def packed(self, codes: Tensor, bits: int) -> Tensor:
        """Codes packed into bytes."""
        joined, *planes = tf.split(codes, 8 // bits, axis=-1)
        for i, plane in enumerate(planes, start=1):
            joined = tf.bitwise.bitwise_or(joined, tf.bitwise.left_shift(plane, tf.constant(bits * i, tf.uint8)))
        return joined

    def unpacked(self, x: Tensor, bits: int) -> Tensor:
        """Bytes taken apart into codes."""
        shifts = [tf.constant(shift, tf.uint8) for shift in range(0, 8, bits)]
        planes = tf.concat([tf.bitwise.right_shift(x, shift) for shift in shifts], axis=-1)
        return tf.bitwise.bitwise_and(planes, tf.constant(2**bits - 1, tf.uint8))

    def uniform(self, size: int, seed: int, step: int) -> Tensor:
        """Numbers in [0, 1) that need no state."""
        return tf.random.stateless_uniform([size], tf.stack([tf.constant(seed, tf.int64), tf.cast(step, tf.int64)]))

    def from_host(self, make: Callable[[int], NumPyArray], step: int, size: int, dtype: str) -> Tensor:
        """What Python makes: a constant where the step is known."""
        if isinstance(step, int):
            return tf.constant(make(step), dtype)
        made = tf.numpy_function(lambda number: make(int(number)).astype(dtype), [step], tf.as_dtype(dtype))
        return tf.ensure_shape(made, [size])

    def take(self, x: Tensor, places: Tensor) -> Tensor:
        """Some elements."""
        return tf.gather(x, places)

    def added_at(self, x: Tensor, places: Tensor, values: Tensor) -> Tensor:
        """``x`` with values added."""
        return tf.tensor_scatter_nd_add(x, places[:, None], values)

    def places_of_largest(self, x: Tensor, count: int) -> Tensor:
        """Where the largest ones are; of equal ones the first."""
        size = tf.where(tf.math.is_nan(x), tf.constant(np.inf, x.dtype), tf.abs(x))
        return tf.sort(tf.cast(tf.math.top_k(size, count).indices, tf.int64))

    def transposed(self, x: Tensor) -> Tensor:
        """Rows as columns."""
        return tf.transpose(x)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """The product of two matrices."""
        return tf.matmul(x, y)

    def orthonormal(self, x: Tensor) -> Tensor:
        """Rows of length 1, times the inverse of the Cholesky factor of their products."""
        rows = tf.cast(self.over(x, self.largest(x)), tf.float64)
        rows = self.over(rows, tf.norm(rows, axis=-1, keepdims=True))
        products = tf.matmul(rows, rows, transpose_b=True) + RIDGE * tf.eye(rows.shape[0], dtype=tf.float64)
        return tf.cast(tf.linalg.triangular_solve(tf.linalg.cholesky(products), rows), x.dtype)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def strung(self, parts: Sequence[Tensor], size: int) -> Tensor:
        """One-dimensional tensors, ``size`` elements in all, behind one another; in a graph, in memory that is lent."""
        if tf.executing_eagerly() or not self.hosts(parts[0]):
            return tf.concat(parts, 0)
        (whole,) = self.on_host(lambda *given: np.concatenate(given[:-1], out=given[-1]), parts, [Output((size,))])
        return whole

    def on_host(
        self, function: HostFunction, inputs: Sequence[Tensor | int], outputs: Sequence[Output[Tensor]]
    ) -> list[Tensor]:
        """Have Python call the function when the graph runs; TensorFlow's tensors are not written into."""

        def call(*arrays: NumPyArray) -> list[NumPyArray]:
            written = [self._pool.lend(o.shape, o.dtype) for o in outputs]
            function(*arrays, *written)
            return written

        found = tf.numpy_function(call, list(inputs), [tf.as_dtype(o.dtype) for o in outputs])
        found = found if isinstance(found, list | tuple) else [found]
        return [tf.ensure_shape(tensor, o.shape) for tensor, o in zip(found, outputs, strict=True)]

    def hosts(self, x: Tensor) -> bool:
        """Whether host functions are the fastest way."""
        from hvdplus import kernels  # numba, which takes its time

        return x.dtype == tf.float32 and not _has_gpu() and kernels.available()


def _write_norm(x: NumPyArray, norm: NumPyArray) -> None:
    tiles = (x[begin : begin + _TILE].astype(np.float64) for begin in range(0, x.size, _TILE))
    norm[...] = sum(float(np.vdot(tile, tile)) for tile in tiles) ** 0.5


@functools.cache
def _has_gpu() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))
