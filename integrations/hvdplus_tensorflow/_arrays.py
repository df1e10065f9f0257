"""The array operations of a codec, on TensorFlow tensors: eager ones, and those of a graph that is being traced."""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf

Tensor: TypeAlias = Any  # tf.Tensor, eager or symbolic; TensorFlow ships no types


class TensorFlowArrays:
    """``hvdplus.arrays.Arrays`` for tensors of static shape. In a graph the answers of ``norm`` and ``all_finite``
    are symbolic.
    """

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
        norm = tf.norm(tf.cast(x, tf.float64))
        return float(norm) if tf.executing_eagerly() else norm

    def all_finite(self, x: Tensor) -> Tensor:
        """Whether no element is infinite or NaN."""
        return tf.reduce_all(tf.math.is_finite(x))

    def where_finite(self, condition: Tensor, then: Tensor, otherwise: Tensor) -> Tensor:
        """``then`` if all of ``condition`` is finite, else ``otherwise``."""
        return tf.where(self.all_finite(condition), then, otherwise)

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

    def to_bits(self, x: Tensor, dtype: str) -> Tensor:
        """Round to a 2-byte ``dtype`` and show the bits."""
        return tf.bitcast(tf.cast(x, dtype), tf.int16)

    def from_bits(self, x: Tensor, dtype: str, into: str) -> Tensor:
        """Read the bits of ``dtype``."""
        if dtype == "bfloat16":  # a shift, because TensorFlow's cast takes subnormal numbers for 0
            whole = tf.bitwise.left_shift(tf.cast(tf.bitcast(x, tf.uint16), tf.uint32), tf.constant(16, tf.uint32))
            return tf.cast(tf.bitcast(whole, tf.float32), into)
        return tf.cast(tf.bitcast(x, dtype), into)
