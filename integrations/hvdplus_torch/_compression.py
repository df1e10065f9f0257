"""Horovod's ``Compression``: names for what ``compression=`` may be, usable with its ``allreduce`` as well."""

from __future__ import annotations

from typing import Any

import torch


class _NoneCompressor:
    """Leaves a tensor as it is."""

    codec = "exact"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor, and nothing to remember."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the tensor."""
        return tensor


class _FP16Compressor:
    """Casts floating-point tensors to fp16 and back."""

    codec = "fp16"

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in fp16, and its dtype to remember."""
        return (tensor.to(torch.float16), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the tensor in the dtype that was remembered."""
        return tensor if context is None else tensor.to(context)


class Compression:
    """Horovod's choice of compression; hvdplus' own codecs are named in a ``strategy``."""

    none = _NoneCompressor
    fp16 = _FP16Compressor
