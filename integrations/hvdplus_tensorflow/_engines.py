"""The collectives on TensorFlow tensors: Horovod's, and a bridge to host engines; eagerly and in graphs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvdplus.arrays import NumPyArray
from hvdplus.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collectives,
    Mapped,
    Pending,
    Ready,
    ReduceScatter,
    Request,
)
from hvdplus.engines import built_for
from hvdplus.world import World
from hvdplus_tensorflow._arrays import Tensor, TensorFlowArrays

_ARRAYS = TensorFlowArrays()
_WORD = 4  # bytes of an int32


def horovod() -> Any:
    """Return the module ``horovod.tensorflow``."""
    import horovod.tensorflow

    return horovod.tensorflow


def horovod_serves(world: World) -> bool:
    """Whether Horovod is built for TensorFlow and can join what this launcher started."""
    try:
        hvd = horovod()
        gloo, mpi = bool(hvd.gloo_built()), bool(hvd.mpi_built())
    except Exception:  # absent, built without TensorFlow (ImportError) or for another version (a tf.errors class)
        return False
    return built_for(world, gloo, mpi)


def start_horovod(*args: Any, **kwargs: Any) -> HorovodCollectives:
    """Initialise Horovod with its own arguments."""
    horovod().init(*args, **kwargs)
    return HorovodCollectives()


class HorovodCollectives:
    """Horovod among the ranks of one process set.

    Its ops match by the last part of their names, whatever scope or function they are traced in.
    """

    def __init__(self, process_set: Any = None) -> None:
        self._hvd = horovod()
        self._set = process_set or self._hvd.global_process_set
        self.rank: int = self._set.rank()
        self.size: int = self._set.size()
        self.label = f"set{self._set.process_set_id}"
        # Gloo gathers in one direction after the other, and sums in both at once: in half the time.
        self._swaps = self.size == 2 and not (self._hvd.mpi_enabled() or self._hvd.nccl_built())

    def own(self) -> Pending[HorovodCollectives]:
        """Return itself: names tell its users apart."""
        return Ready(self)

    def sums(self, value: Tensor, dtype: str) -> bool:
        """Horovod refuses bf16; its fp16 sum on a CPU is slow software that rounds at every step."""
        return dtype != "bfloat16" and (dtype != "float16" or "GPU" in value.device)

    def start(self, request: Request[Tensor], name: str) -> Pending[Tensor]:
        """Put Horovod's op for ``request`` into the graph, or run it."""
        hvd, value, shape = self._hvd, request.value, request.value.shape
        options = {
            "name": re.sub(r"\W", "_", name),
            "process_set": self._set,
            "ignore_name_scope": True,
        }
        if isinstance(request, AllReduce):
            answer = hvd.allreduce(value, op=hvd.Sum, prescale_factor=request.scale, **options)
        elif isinstance(request, AllGather) and self._swaps and swappable(value):
            words = as_words(value)
            total = hvd.allreduce(words, op=hvd.Sum, **options)
            return Ready(told_apart(total, words, value, self.rank))
        elif isinstance(request, AllGather):
            answer, shape = hvd.allgather(value, **options), [self.size, *shape]
        elif isinstance(request, AllToAll):
            answer = hvd.alltoall(value, **options)
        elif isinstance(request, Broadcast):
            answer = hvd.broadcast(value, self._global_rank(request.root), **options)
        else:
            answer = hvd.reducescatter(value, op=hvd.Sum, prescale_factor=request.scale, **options)
            shape = shape[1:]
        return Ready(tf.reshape(answer, shape))

    def _global_rank(self, root: int) -> int:
        ranks = self._set.ranks
        return int(ranks[root]) if ranks else root


def swappable(value: Tensor) -> bool:
    """Whether two ranks may gather ``value`` as a sum: it has bytes, which TensorFlow shows."""
    return bool(value.dtype != tf.bool and value.shape.rank and value.shape.num_elements())


def as_words(value: Tensor) -> Tensor:
    """Return the memory of ``value`` as int32 in one dimension, zeros at the end."""
    raw = _ARRAYS.to_bytes(tf.reshape(value, [-1]))
    return _ARRAYS.from_bytes(_ARRAYS.padded(raw, -(-_ARRAYS.count(raw) // _WORD) * _WORD), "int32")


def told_apart(total: Tensor, mine: Tensor, value: Tensor, rank: int) -> Tensor:
    """Return two ranks' values behind one another, from the sum of their words: each takes its own off.

    Whole numbers wrap without loss.
    """
    raw = _ARRAYS.head(_ARRAYS.to_bytes(total - mine), _ARRAYS.nbytes(value))
    other = tf.reshape(_ARRAYS.from_bytes(raw, value.dtype.name), value.shape)
    return tf.stack([other, value] if rank else [value, other])


@dataclass
class _Posted:
    """A request that a graph posts when it runs; ``claim`` puts the wait for its answer into the graph."""

    claim: Callable[[], Tensor]

    def done(self) -> bool:
        """Return True: the graph waits, not the tracing of it."""
        return True

    def result(self) -> Tensor:
        """Return the symbolic answer."""
        return self.claim()


class HostBridge:
    """A host engine for tensors. In a graph one Python op posts a request and another waits, in the order of tracing.

    ``wait`` is what a graph waits with; the session puts its watch's there.
    """

    def __init__(self, inner: Collectives[NumPyArray]) -> None:
        self.inner = inner
        self.rank, self.size, self.label = inner.rank, inner.size, inner.label
        self.wait: Callable[[Pending[NumPyArray]], Any] = lambda pending: pending.result()
        self._flying: dict[int, Pending[NumPyArray]] = {}
        self._tickets = itertools.count()
        self._last: tuple[Any, Any] = (None, None)  # a graph, and its last op of ours

    def own(self) -> Pending[HostBridge]:
        """Return itself: a step's graph fixes the order of its exchanges."""
        return Ready(self)

    def sums(self, value: Tensor, dtype: str) -> bool:
        """Ask the host engine, which decides by dtype."""
        return self.inner.sums(np.empty(0), dtype)

    def start(self, request: Request[Tensor], name: str) -> Pending[Tensor]:
        """Post ``request`` now, or when the graph runs."""
        if tf.executing_eagerly():
            return Mapped(self._post(request, name, request.value.numpy()), tf.convert_to_tensor)

        def post(value: NumPyArray) -> int:
            ticket = next(self._tickets)
            self._flying[ticket] = self._post(request, name, value)
            return ticket

        ticket = self._in_order(post, request.value, tf.int64)
        return _Posted(lambda: self._claim(ticket, request))

    def _post(self, request: Request[Tensor], name: str, value: NumPyArray) -> Pending[NumPyArray]:
        host: Request[Any] = replace(request, value=value.copy())
        return self.inner.start(host, name)

    def _claim(self, ticket: Tensor, request: Request[Tensor]) -> Tensor:
        shape = list(request.value.shape)
        if isinstance(request, AllGather):
            shape = [self.size, *shape]
        elif isinstance(request, ReduceScatter):
            shape = shape[1:]
        answer = self._in_order(lambda n: self.wait(self._flying.pop(int(n))), ticket, request.value.dtype)
        return tf.reshape(answer, shape)

    def _in_order(self, function: Callable[[Any], Any], value: Tensor, dtype: Any) -> Tensor:
        """Have the graph run ``function`` after all that were traced before it: MPI matches by order."""
        graph = tf.compat.v1.get_default_graph()
        before = [self._last[1].op] if self._last[0] is graph else []
        with tf.control_dependencies(before):
            answer = tf.numpy_function(function, [value], dtype)
        self._last = (graph, answer)
        return answer
