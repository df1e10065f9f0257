"""The collectives and the questions about ranks, as the backend's own adapter answers them."""

from __future__ import annotations

from typing import Any

import keras

from hvdplus.world import World
from hvdplus_keras._backend import adapter, backend
from hvdplus_keras._exchanger import copy_from


def init(*args: Any, **kwargs: Any) -> None:
    """Join the job; arguments are Horovod's (``comm``, ``process_sets``) and need its engine.

    Raises:
        LaunchError: no engine can serve what the launcher started, or the engine sees another world.
        StrategyError: Keras runs on a backend that is not served.
    """
    adapter().init(*args, **kwargs)


def world() -> World:
    """Return this rank's place in the job."""
    return backend().session().world


def _tensor(value: Any) -> Any:
    return keras.ops.convert_to_tensor(value)


def allreduce(value: Any, name: str | None = None, average: bool | None = None, **options: Any) -> Any:
    """Return the mean (default) or sum over ranks of a value that can become a tensor."""
    return adapter().allreduce(_tensor(value), average=average, name=name, **options)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return all ranks' values behind one another along the first dimension."""
    return adapter().allgather(_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return ``root_rank``'s value."""
    return adapter().broadcast(_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, **options: Any) -> Any:
    """Return this rank's equal part of the mean (default) or sum over ranks."""
    return adapter().reducescatter(_tensor(value), name=name, **options)


def broadcast_variables(variables: Any, root_rank: int = 0) -> None:
    """Overwrite Keras variables with those of ``root_rank``."""
    copy_from(backend().session(), list(variables), root_rank)
