"""hvdplus for Keras 3, on its TensorFlow and torch backends: Horovod's names, and an optimizer that exchanges."""

from __future__ import annotations

import importlib
from typing import Any

from hvdplus.horovod_arguments import Adasum, Average, Sum
from hvdplus_keras import callbacks
from hvdplus_keras._backend import adapter
from hvdplus_keras._io import load_model
from hvdplus_keras._ops import allgather, allreduce, broadcast, broadcast_variables, init, reducescatter
from hvdplus_keras._optimizer import DistributedOptimizer, PartialDistributedOptimizer, wrap

__all__ = [
    "Adasum",
    "Average",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "callbacks",
    "init",
    "load_model",
    "reducescatter",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Everything else (``rank``, ``size``, ``Compression``, ``ProcessSet``, ...) is the backend's own adapter's."""
    if name.startswith("__"):
        raise AttributeError(f"module 'hvdplus.keras' has no attribute {name!r}")
    if name == "elastic":
        return importlib.import_module("hvdplus_keras.elastic")
    try:
        return getattr(adapter(), name)
    except AttributeError:
        raise AttributeError(f"module 'hvdplus.keras' has no attribute {name!r}") from None
