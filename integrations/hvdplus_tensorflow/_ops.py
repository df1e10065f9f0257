"""The collectives under Horovod's names: Horovod's own where it is the engine, else the same on our engines."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdplus.collectives import AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter, Request
from hvdplus.errors import LaunchError, StrategyError
from hvdplus.horovod_arguments import Average, Sum
from hvdplus_tensorflow import _session
from hvdplus_tensorflow._arrays import Tensor
from hvdplus_tensorflow._compression import Compression
from hvdplus_tensorflow._engines import horovod

_NUMBERS = itertools.count(1)


def _horovod_or(own: Callable[..., Any]) -> Callable[..., Any]:
    """Call Horovod's function of this name where Horovod is the engine (or nothing is initialised), else ``own``."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _session.is_initialized() or _session.session().engine == "horovod":
            given = {key: value for key, value in kwargs.items() if key != "process_set" or value is not None}
            return getattr(horovod(), own.__name__)(*args, **given)
        return own(*args, **kwargs)

    return call


def _answer(request: Request[Tensor], name: str | None) -> Tensor:
    current = _session.session()
    return current.watch.wait(current.collectives.start(request, f"hvdplus.op.{name or next(_NUMBERS)}"))


def _factor(op: Any, average: bool | None) -> float:
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


def _check_group(process_set: Any) -> None:
    if process_set is not None:
        raise StrategyError(f"process_set= needs engine 'horovod', and this is {_session.session().engine!r}.")


@_horovod_or
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = None,
) -> Tensor:
    """Return the mean (default) or sum over ranks of ``tensor``, of its shape; differentiable."""
    _check_group(process_set)
    factor = _factor(op, average) * prescale_factor * postscale_factor
    small, context = compression.compress(tf.convert_to_tensor(tensor))
    half = small.dtype in (tf.float16, tf.bfloat16)  # our engines add in fp32
    total = _reduced(tf.cast(small, tf.float32) if half else small, factor, name)
    return compression.decompress(tf.cast(total, small.dtype), context)


def _summed(kind: Any, value: Tensor, factor: float, name: str | None) -> Tensor:
    """Return a sum over ranks times ``factor``; whole numbers are added up before they are multiplied."""
    if value.dtype.is_floating or factor == 1.0:
        return _answer(kind(value, factor), name)
    return tf.cast(tf.cast(_answer(kind(value), name), tf.float64) * factor, value.dtype)


def _reduced(tensor: Tensor, factor: float, name: str | None) -> Tensor:
    """Add up over ranks; the gradient of that is the sum over ranks of the gradients."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(value: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        total = tf.reshape(_summed(AllReduce, tf.reshape(value, [-1]), factor, name), value.shape)
        return total, lambda upstream: _reduced(upstream, factor, name and f"{name}.grad")

    return reduce(tensor)


@_horovod_or
def grouped_allreduce(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> list[Tensor]:
    """Do ``allreduce`` for each of several tensors."""
    return [allreduce(tensor, *args, **kwargs) for tensor in tensors]


@_horovod_or
def allgather(tensor: Any, name: str | None = None, process_set: Any = None) -> Tensor:
    """Return all ranks' tensors behind one another along the first dimension, which may differ between ranks."""
    _check_group(process_set)
    value = tf.convert_to_tensor(tensor)
    if not tf.executing_eagerly():
        raise StrategyError("allgather in a graph needs engine 'horovod'; call it outside of tf.function.")
    lengths = _answer(AllGather(tf.constant([len(value)], tf.int64)), name and f"{name}.length").numpy().reshape(-1)
    row = math.prod(value.shape[1:])
    padding = int(lengths.max()) * row - int(tf.size(value))
    everyone = _answer(AllGather(tf.pad(tf.reshape(value, [-1]), [[0, padding]])), name)
    parts = [part[: int(n) * row] for part, n in zip(everyone, lengths, strict=True)]
    return tf.reshape(tf.concat(parts, 0), [int(lengths.sum()), *value.shape[1:]])


@_horovod_or
def grouped_allgather(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> list[Tensor]:
    """Do ``allgather`` for each of several tensors."""
    return [allgather(tensor, *args, **kwargs) for tensor in tensors]


@_horovod_or
def broadcast(tensor: Any, root_rank: int, name: str | None = None, process_set: Any = None) -> Tensor:
    """Return ``root_rank``'s tensor."""
    _check_group(process_set)
    return _answer(Broadcast(tf.convert_to_tensor(tensor), root_rank), name)


@_horovod_or
def broadcast_(variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: Any = None) -> Any:
    """Overwrite variables with ``root_rank``'s."""
    return [variable.assign(broadcast(variable, root_rank, name, process_set)) for variable in variables]


@_horovod_or
def alltoall(tensor: Any, splits: Any = None, name: str | None = None, process_set: Any = None) -> Tensor:
    """Send the i-th equal part of the first dimension to rank i; return the parts that all ranks sent here."""
    _check_group(process_set)
    value, ranks = tf.convert_to_tensor(tensor), _session.size()
    if splits is not None:
        raise StrategyError("alltoall(splits=) needs engine 'horovod'; leave it out for equal parts.")
    _check_parts(value, ranks)
    return tf.reshape(_answer(AllToAll(tf.reshape(value, [ranks, -1])), name), value.shape)


@_horovod_or
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    name: str | None = None,
    process_set: Any = None,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's equal part, along the first dimension, of the mean (default) or sum over ranks."""
    _check_group(process_set)
    ranks = _session.size()
    value, context = compression.compress(tf.convert_to_tensor(tensor))
    _check_parts(value, ranks)
    factor = _factor(op, None) * prescale_factor * postscale_factor
    half = value.dtype in (tf.float16, tf.bfloat16)  # our engines add in fp32
    rows = tf.reshape(tf.cast(value, tf.float32) if half else value, [ranks, -1])
    part = tf.cast(_summed(ReduceScatter, rows, factor, name), value.dtype)
    return compression.decompress(tf.reshape(part, [value.shape[0] // ranks, *value.shape[1:]]), context)


def _check_parts(value: Tensor, ranks: int) -> None:
    if value.shape[0] % ranks:
        raise StrategyError(f"the first dimension, {value.shape[0]}, must be a multiple of the {ranks} ranks.")


@_horovod_or
def grouped_reducescatter(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> list[Tensor]:
    """Do ``reducescatter`` for each of several tensors."""
    return [reducescatter(tensor, *args, **kwargs) for tensor in tensors]


@_horovod_or
def join() -> Any:
    """Say that this rank has no more data; Horovod's engine then answers for it with zeros."""
    raise LaunchError(f"join() needs engine 'horovod', and this is {_session.session().engine!r}.")


def barrier() -> None:
    """Wait until all ranks are here."""
    _session.session().gather(b"")
