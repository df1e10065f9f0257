"""Torch's array operations, by the common cases."""

from __future__ import annotations

import pytest
from arrays_cases import ArraysCases

torch = pytest.importorskip("torch")
from hvdplus_torch._arrays import TorchArrays  # noqa: E402


class TestTorchArrays(ArraysCases):
    arrays = TorchArrays()
    lend = staticmethod(lambda array: torch.from_numpy(array.copy()))
    read = staticmethod(lambda tensor: tensor.numpy())


if torch.cuda.is_available():

    class TestTorchArraysOnGPU(ArraysCases):
        arrays = TorchArrays("cuda")
        lend = staticmethod(lambda array: torch.from_numpy(array.copy()).cuda())
        read = staticmethod(lambda tensor: tensor.cpu().numpy())


def test_bfloat16_tensors_have_bits_too():
    values = torch.tensor([1.0, -0.0, float("inf")], dtype=torch.bfloat16)
    bits = TorchArrays().to_bits(values, "bfloat16")
    assert bits.dtype == torch.int16
    back = TorchArrays().from_bits(bits, "bfloat16", "bfloat16")
    assert torch.equal(back.view(torch.int16), values.view(torch.int16))
