"""TensorFlow's array operations, by the common cases."""

from __future__ import annotations

import numpy as np
import pytest
from arrays_cases import ArraysCases

tf = pytest.importorskip("tensorflow")
from hvdplus_tensorflow._arrays import TensorFlowArrays  # noqa: E402


class TestTensorFlowArrays(ArraysCases):
    arrays = TensorFlowArrays()
    lend = staticmethod(lambda array: tf.constant(array))
    read = staticmethod(lambda tensor: tensor.numpy())

    def check(self, name, *operands, **others):
        """TensorFlow's kernels take a subnormal fp32 or fp64 number for 0, as operand and as result."""
        if name == "from_bits" and others == {"dtype": "bfloat16", "into": "float64"}:
            operands = [np.where(operands[0] & 0x7F80, operands[0], np.int16(0))]
        super().check(name, *map(_normal, operands), **others)


def _normal(operand):
    if not isinstance(operand, np.ndarray) or operand.dtype not in (np.float32, np.float64):
        return operand
    small = np.abs(operand) < 4 * np.finfo(operand.dtype).tiny
    return np.where(small, np.zeros_like(operand), operand)
