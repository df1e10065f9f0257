"""The session of this process in TensorFlow: ``init()``, ``shutdown()`` and the questions about ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from hvdplus import session as core
from hvdplus.arrays import NumPyArray
from hvdplus_tensorflow._arrays import Tensor
from hvdplus_tensorflow._engines import HostBridge, horovod, horovod_serves, start_horovod

Session: TypeAlias = core.Session[Tensor]


def _lend(array: NumPyArray) -> Tensor:
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(array)


FRAMEWORK = core.Framework(
    name="tensorflow",
    lend=_lend,
    read=lambda tensor: tensor.numpy(),
    host=HostBridge,
    horovod=start_horovod,
    horovod_serves=horovod_serves,
    horovod_stop=lambda: horovod().shutdown(),
    late=True,
)

_HOLDER = core.Holder(FRAMEWORK)
shutdown, is_initialized = _HOLDER.shutdown, _HOLDER.is_initialized
session, rank, size = _HOLDER.session, _HOLDER.rank, _HOLDER.size


def init(*args: Any, **kwargs: Any) -> None:
    """Join the job: find this rank, choose the engine (``HVDPLUS_ENGINE``), start it.

    No TensorFlow op runs here, so devices may still be chosen by ``local_rank()``. A second call does nothing.
    Arguments are Horovod's (``comm``, ``process_sets``) and need its engine.

    Raises:
        LaunchError: no engine can serve what the launcher started, or the engine sees another world.
    """
    _HOLDER.init(*args, **kwargs)
    current = session()
    if isinstance(current.collectives, HostBridge):
        current.collectives.wait = current.watch.wait


def local_rank() -> int:
    """Return the rank among the ranks on this host, before TensorFlow has looked at any device."""
    if os.environ.get("HVDPLUS_LOCAL_RANK"):
        return session().world.local_rank or 0
    return int(_of_host("local_rank", lambda current: current.world.local_rank))


def local_size() -> int:
    """Return the number of ranks on this host."""
    return int(_of_host("local_size", lambda current: current.world.local_size))


def cross_rank() -> int:
    """Return the number of this host among the hosts that have a rank of this local rank."""
    return int(_of_host("cross_rank", lambda current: current.cross[0]))


def cross_size() -> int:
    """Return the number of hosts that have a rank of this local rank."""
    return int(_of_host("cross_size", lambda current: current.cross[1]))


def _of_host(question: str, answer: Callable[[Session], int | None]) -> int:
    """Ask Horovod where it is the engine: our own answer needs TensorFlow's devices, which a program chooses by it."""
    current = session()
    if current.engine == "horovod":
        return int(getattr(horovod(), question)())
    current.meet()
    return answer(current) or 0
