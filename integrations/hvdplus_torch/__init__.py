"""hvdplus for PyTorch: Horovod's names, with an optimizer wrapper that any torch idiom works with."""

from __future__ import annotations

from typing import Any

from hvdplus.errors import LaunchError
from hvdplus.horovod_arguments import Adasum, Average, Max, Min, Product, Sum
from hvdplus_torch._broadcast import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdplus_torch._compression import Compression
from hvdplus_torch._ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from hvdplus_torch._optimizer import DistributedOptimizer, wrap
from hvdplus_torch._session import (
    cross_rank,
    cross_size,
    device,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "device",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "size",
    "synchronize",
    "wrap",
]

# What only Horovod has; looked up there when somebody asks.
_HOROVOD_ONLY = frozenset(
    {
        "HorovodInternalError",
        "ProcessSet",
        "SyncBatchNorm",
        "add_process_set",
        "ccl_built",
        "cuda_built",
        "ddl_built",
        "elastic",
        "global_process_set",
        "gloo_built",
        "gloo_enabled",
        "mpi_built",
        "mpi_enabled",
        "mpi_threads_supported",
        "nccl_built",
        "remove_process_set",
        "rocm_built",
        "sparse_allreduce_async",
        "start_timeline",
        "stop_timeline",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _HOROVOD_ONLY:
        raise AttributeError(f"module 'hvdplus.torch' has no attribute {name!r}")
    from hvdplus_torch._engines import horovod

    try:
        return getattr(horovod(), name)
    except ImportError as error:
        raise LaunchError(
            f"hvdplus.torch.{name} is Horovod's, and Horovod is not installed for torch; run 'hvdplus install-horovod'."
        ) from error
