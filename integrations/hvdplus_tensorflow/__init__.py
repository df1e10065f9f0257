"""hvdplus for TensorFlow: Horovod's names, and gradients in any codec; for optimizers see hvdplus.keras."""

from __future__ import annotations

from typing import Any

from hvdplus.errors import LaunchError
from hvdplus.horovod_arguments import Adasum, Average, Max, Min, Product, Sum
from hvdplus_tensorflow._broadcast import allgather_object, broadcast_object, broadcast_variables
from hvdplus_tensorflow._compression import Compression
from hvdplus_tensorflow._ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from hvdplus_tensorflow._session import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hvdplus_tensorflow._tape import DistributedGradientTape

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_variables",
    "cross_rank",
    "cross_size",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> Any:
    """What only Horovod has (process sets, elastic, timelines, graph-mode ranks) is looked up there."""
    if name.startswith("__"):
        raise AttributeError(f"module 'hvdplus.tensorflow' has no attribute {name!r}")
    if name == "DistributedOptimizer":
        from hvdplus_tensorflow._optimizer import DistributedOptimizer

        return DistributedOptimizer
    from hvdplus_tensorflow._engines import horovod

    try:
        return getattr(horovod(), name)
    except ImportError as error:
        raise LaunchError(
            f"hvdplus.tensorflow.{name} is Horovod's, and Horovod is not installed for TensorFlow; run 'hvdplus "
            f"install-horovod'."
        ) from error
    except AttributeError:
        raise AttributeError(f"module 'hvdplus.tensorflow' has no attribute {name!r}") from None
