"""Horovod's ``Compression``: names for what ``compression=`` may be, usable with its ``allreduce`` as well."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdplus_tensorflow._arrays import Tensor


class _NoneCompressor:
    """Leaves a tensor as it is."""

    codec = "exact"

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor, and nothing to remember."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        """Return the tensor."""
        return tensor


class _FP16Compressor:
    """Casts floating-point tensors to fp16 and back."""

    codec = "fp16"

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor in fp16, and its dtype to remember."""
        return (tf.cast(tensor, tf.float16), tensor.dtype) if tensor.dtype.is_floating else (tensor, None)

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        """Return the tensor in the dtype that was remembered."""
        return tensor if context is None else tf.cast(tensor, context)


class Compression:
    """Horovod's choice of compression; hvdplus' own codecs are named in a ``strategy``."""

    none = _NoneCompressor
    fp16 = _FP16Compressor
