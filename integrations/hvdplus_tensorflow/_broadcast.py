"""Copies variables and objects from one rank to all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdplus.collectives import Collectives
from hvdplus.errors import StrategyError
from hvdplus_tensorflow import _session
from hvdplus_tensorflow._arrays import Tensor
from hvdplus_tensorflow._engines import HorovodCollectives, horovod


def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: Any = None, inplace: bool = False
) -> Any:
    """Overwrite TensorFlow or Keras variables, of any dtype, with those of ``root_rank``; eagerly or in a graph.

    Args:
        variables: ``model.variables``, ``optimizer.variables``, or a list.
        root_rank: the rank whose values all get.
        process_set: among whose ranks, with Horovod as the engine.
        inplace: Horovod's.
    """
    plain = [getattr(v, "value", v) if not isinstance(v, tf.Variable) else v for v in variables]
    if not _session.is_initialized() or _session.session().engine == "horovod":
        return horovod().broadcast_variables(plain, root_rank, inplace=inplace, **_given(process_set))
    if not tf.executing_eagerly():
        raise StrategyError("broadcast_variables in a graph needs engine 'horovod'; call it outside of tf.function.")
    for variable in plain:
        variable.assign(_session.session().broadcast(variable.numpy(), root_rank))
    return None


def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = None
) -> Any:
    """Return ``root_rank``'s ``obj``, pickled and sent to all ranks; ``session`` and ``name`` are Horovod's."""
    if _in_session():
        return horovod().broadcast_object(obj, root_rank, session, name, **_given(process_set))
    current, among = _session.session(), _among(process_set)
    root = root_rank if process_set is None or not process_set.ranks else process_set.ranks.index(root_rank)
    payload = np.frombuffer(pickle.dumps(obj), np.uint8)
    length = int(current.broadcast(np.array([payload.size]), root, among)[0])
    mine = payload if payload.size == length else np.zeros(length, np.uint8)
    return pickle.loads(current.broadcast(mine, root, among).tobytes())


def allgather_object(obj: Any, session: Any = None, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Return every rank's ``obj``, in rank order."""
    if _in_session():
        everyone: list[Any] = horovod().allgather_object(obj, session, name, **_given(process_set))
        return everyone
    return [pickle.loads(text) for text in _session.session().gather(pickle.dumps(obj), _among(process_set))]


def _in_session() -> bool:
    """Whether this is a TensorFlow 1 program, whose graphs only Horovod knows how to run."""
    return not tf.executing_eagerly() and not tf.inside_function() and _session.session().engine == "horovod"


def _given(process_set: Any) -> dict[str, Any]:
    return {} if process_set is None else {"process_set": process_set}


def _among(process_set: Any) -> Collectives[Tensor] | None:
    return None if process_set is None else HorovodCollectives(process_set)
