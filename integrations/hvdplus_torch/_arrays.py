"""The array operations of a codec, on torch tensors of any device."""

from __future__ import annotations

import torch

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int16": torch.int16,
    "uint8": torch.uint8,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


class TorchArrays:
    """``hvdplus.arrays.Arrays`` for tensors on one device."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def zeros(self, size: int, dtype: str) -> torch.Tensor:
        """``size`` zeros."""
        return torch.zeros(size, dtype=_DTYPES[dtype], device=self.device)

    def dtype(self, x: torch.Tensor) -> str:
        """The name of the dtype."""
        return dtype_name(x.dtype)

    def count(self, x: torch.Tensor) -> int:
        """The number of elements."""
        return x.numel()

    def nbytes(self, x: torch.Tensor) -> int:
        """The number of bytes."""
        return x.numel() * x.element_size()

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor with the same values."""
        return x.clone()

    def cast(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        """``x`` in ``dtype``."""
        return x.to(_DTYPES[dtype])

    def scaled(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """``x * factor``."""
        return x * factor

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``x + y``."""
        return x + y

    def subtract(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``x - y``."""
        return x - y

    def norm(self, x: torch.Tensor) -> float:
        """The Euclidean norm."""
        return float(torch.linalg.vector_norm(x, dtype=torch.float64))

    def all_finite(self, x: torch.Tensor) -> bool:
        """Whether no element is infinite or NaN."""
        return bool(torch.isfinite(x).all())

    def where_finite(self, condition: torch.Tensor, then: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """``then`` if all of ``condition`` is finite, else ``otherwise``; decided on the device."""
        return torch.where(torch.isfinite(condition).all(), then, otherwise)

    def rows(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """``x`` padded with zeros and cut into ``count`` equal rows."""
        return torch.nn.functional.pad(x, (0, -x.numel() % count)).view(count, -1)

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """Rows behind one another."""
        return x.reshape(-1)

    def head(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """The first ``count`` elements."""
        return x[:count]

    def mean_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over rows, each divided before it is added."""
        return (x * (1.0 / len(x))).sum(dim=0)

    def to_bits(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        """Round to a 2-byte ``dtype`` and show the bits."""
        return x.to(_DTYPES[dtype]).view(torch.int16)

    def from_bits(self, x: torch.Tensor, dtype: str, into: str) -> torch.Tensor:
        """Read the bits of ``dtype``."""
        return x.view(_DTYPES[dtype]).to(_DTYPES[into])
