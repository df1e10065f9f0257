"""The collectives under Horovod's names: Horovod's own where it is the engine, else the same on our engines."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdplus.collectives import AllGather, AllReduce, AllToAll, Pending, ReduceScatter, Request
from hvdplus.errors import LaunchError, StrategyError
from hvdplus.horovod_arguments import Average, Sum
from hvdplus_torch import _session
from hvdplus_torch._compression import Compression
from hvdplus_torch._engines import horovod

_HANDLES: dict[int, Any] = {}
_NUMBERS = itertools.count(1)


def _horovod_or(own: Callable[..., Any]) -> Callable[..., Any]:
    """Call Horovod's function of this name where Horovod is the engine (or nothing is initialised), else ``own``."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _session.is_initialized() or _session.session().engine == "horovod":
            return _with_dense_gradient(getattr(horovod(), own.__name__)(*args, **kwargs))
        return own(*args, **kwargs)

    return call


def _with_dense_gradient(answer: Any) -> Any:
    """Make the gradient of Horovod's answer contiguous: it refuses the expanded one that ``answer.sum()`` has."""
    for tensor in answer if isinstance(answer, list | tuple) else [answer]:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(_contiguous)
    return answer


def _contiguous(grad: torch.Tensor | None) -> torch.Tensor | None:
    return grad if grad is None else grad.contiguous()


def _wait(request: Request[torch.Tensor], name: str | None) -> torch.Tensor:
    return _session.session().watch.wait(_start(request, name))  # type: ignore[no-any-return]


def _start(request: Request[torch.Tensor], name: str | None) -> Pending[torch.Tensor]:
    return _session.session().collectives.start(request, f"hvdplus.op.{name or next(_NUMBERS)}")


def _mean_or_sum(op: Any, average: bool | None) -> float:
    """Return the factor on every rank's value.

    Raises:
        StrategyError: another reduction than mean and sum.
    """
    if average is not None:
        op = Average if average else Sum
    if op not in (None, Average, Sum):
        raise StrategyError(
            f"op={op!r} needs engine 'horovod'; engine {_session.session().engine!r} has Average and Sum."
        )
    return 1.0 if op == Sum else 1.0 / _session.size()


def _refuse_process_set(process_set: Any) -> None:
    if process_set is not None:
        raise StrategyError(f"process_set= needs engine 'horovod', and this is {_session.session().engine!r}.")


def _summed(kind: Any, value: torch.Tensor, scale: float, name: str | None) -> torch.Tensor:
    """Return a sum over ranks times ``scale``; whole numbers are added up before they are multiplied."""
    if value.is_floating_point() or scale == 1.0:
        return _wait(kind(value, scale), name)
    return (_wait(kind(value), name) * scale).to(value.dtype)


class _AllReduceFunction(torch.autograd.Function):
    """The gradient of a sum over ranks is the sum over ranks of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scale: float, name: str | None) -> torch.Tensor:
        """Return the sum over ranks of ``tensor * scale``."""
        ctx.scale, ctx.name = scale, name
        return _summed(AllReduce, tensor.detach().reshape(-1).clone(), scale, name).view(tensor.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Reduce the gradient in the same way."""
        name = None if ctx.name is None else f"{ctx.name}.grad"
        return _reduced(grads[0], ctx.scale, name), None, None


def _reduced(tensor: torch.Tensor, scale: float, name: str | None) -> torch.Tensor:
    answer: torch.Tensor = _AllReduceFunction.apply(tensor, scale, name)  # type: ignore[no-untyped-call]
    return answer


@_horovod_or
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Return the mean (default) or sum over ranks of ``tensor``, of its shape; differentiable."""
    _refuse_process_set(process_set)
    small, context = compression.compress(tensor)
    scale = _mean_or_sum(op, average) * prescale_factor * postscale_factor
    half = small.dtype in (torch.float16, torch.bfloat16)  # our engines add in fp32
    total = _reduced(small.float() if half else small, scale, name).to(small.dtype)
    return compression.decompress(total, context)  # type: ignore[no-any-return]


@_horovod_or
def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Do ``allreduce`` in place."""
    with torch.no_grad():
        return tensor.copy_(allreduce(tensor, *args, **kwargs))


@_horovod_or
def grouped_allreduce(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Do ``allreduce`` for each of several tensors."""
    return [allreduce(tensor, *args, **kwargs) for tensor in tensors]


@_horovod_or
def grouped_allreduce_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Do ``allreduce_`` for each of several tensors."""
    return [allreduce_(tensor, *args, **kwargs) for tensor in tensors]


@_horovod_or
def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Return all ranks' tensors behind one another along the first dimension, which may differ between ranks."""
    _refuse_process_set(process_set)
    lengths = _wait(AllGather(torch.tensor([len(tensor)])), name and f"{name}.length").flatten().tolist()
    row = tensor[:1].numel() if len(tensor) else int(torch.tensor(tensor.shape[1:]).prod())
    padded = torch.zeros(max(lengths) * row, dtype=tensor.dtype, device=tensor.device)
    padded[: tensor.numel()] = tensor.detach().reshape(-1)
    everyone = _wait(AllGather(padded), name)
    parts = [part[: n * row] for part, n in zip(everyone, lengths, strict=True)]
    return torch.cat(parts).view(sum(lengths), *tensor.shape[1:])


@_horovod_or
def grouped_allgather(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Do ``allgather`` for each of several tensors."""
    return [allgather(tensor, *args, **kwargs) for tensor in tensors]


@_horovod_or
def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Overwrite ``tensor`` with ``root_rank``'s."""
    _refuse_process_set(process_set)
    _session.broadcast(_session.session(), tensor, root_rank, f"op.{name or next(_NUMBERS)}")
    return tensor


@_horovod_or
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Return ``root_rank``'s tensor."""
    return broadcast_(tensor.detach().clone(), root_rank, name, process_set)  # type: ignore[no-any-return]


@_horovod_or
def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """Send the i-th equal part of the first dimension to rank i; return the parts that all ranks sent here."""
    _refuse_process_set(process_set)
    if splits is not None:
        raise StrategyError("alltoall(splits=) needs engine 'horovod'; leave it out for equal parts.")
    ranks = _session.size()
    if len(tensor) % ranks:
        raise StrategyError(f"the first dimension, {len(tensor)}, must be a multiple of the {ranks} ranks.")
    return _wait(AllToAll(tensor.detach().reshape(ranks, -1)), name).reshape(tensor.shape)


@_horovod_or
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's equal part, along the first dimension, of the mean (default) or sum over ranks."""
    _refuse_process_set(process_set)
    ranks = _session.size()
    if len(tensor) % ranks:
        raise StrategyError(f"the first dimension, {len(tensor)}, must be a multiple of the {ranks} ranks.")
    small, context = compression.compress(tensor.detach())
    scale = _mean_or_sum(op, None) * prescale_factor * postscale_factor
    half = small.dtype in (torch.float16, torch.bfloat16)  # our engines add in fp32
    rows = small.float() if half else small.clone()
    part = _summed(ReduceScatter, rows.reshape(ranks, -1), scale, name).to(small.dtype)
    mine = part.view(len(tensor) // ranks, *tensor.shape[1:])
    return compression.decompress(mine, context)  # type: ignore[no-any-return]


@_horovod_or
def grouped_reducescatter(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Do ``reducescatter`` for each of several tensors."""
    return [reducescatter(tensor, *args, **kwargs) for tensor in tensors]


@_horovod_or
def barrier(process_set: Any = None) -> None:
    """Wait until all ranks are here."""
    _refuse_process_set(process_set)
    _session.session().gather(b"")


@_horovod_or
def join(device: int = -1) -> int:
    """Say that this rank has no more data; Horovod's engine then answers for it with zeros."""
    raise LaunchError(f"join() needs engine 'horovod', and this is {_session.session().engine!r}.")


def _remember(value: Any) -> int:
    """Keep a result that is there already under a handle; our engines have done the work by then."""
    number = next(_NUMBERS)
    _HANDLES[number] = value
    return number


def _later(own: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the asynchronous form of ``own``."""

    def start(*args: Any, **kwargs: Any) -> int:
        return _remember(own(*args, **kwargs))

    start.__name__ = name
    start.__doc__ = f"Start ``{own.__name__}``; returns a handle for ``poll`` and ``synchronize``."
    return _horovod_or(start)


allreduce_async = _later(allreduce, "allreduce_async")
allreduce_async_ = _later(allreduce_, "allreduce_async_")
grouped_allreduce_async = _later(grouped_allreduce, "grouped_allreduce_async")
grouped_allreduce_async_ = _later(grouped_allreduce_, "grouped_allreduce_async_")
allgather_async = _later(allgather, "allgather_async")
grouped_allgather_async = _later(grouped_allgather, "grouped_allgather_async")
broadcast_async = _later(broadcast, "broadcast_async")
broadcast_async_ = _later(broadcast_, "broadcast_async_")
alltoall_async = _later(alltoall, "alltoall_async")
reducescatter_async = _later(reducescatter, "reducescatter_async")
grouped_reducescatter_async = _later(grouped_reducescatter, "grouped_reducescatter_async")


@_horovod_or
def poll(handle: int) -> bool:
    """Return whether ``synchronize(handle)`` would return at once."""
    return True


@_horovod_or
def synchronize(handle: int) -> Any:
    """Return the result of an asynchronous collective."""
    return _HANDLES.pop(handle, None)
