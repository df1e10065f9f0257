"""A gradient tape whose gradients are averaged over the ranks, in a codec where one is named."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from hvdplus import autotune
from hvdplus.agreement import agree, describe
from hvdplus.arrays import NumPyArray
from hvdplus.errors import ExchangeError, StrategyError
from hvdplus.plan import Parameter, plan
from hvdplus.stats import Stats
from hvdplus.strategy import Strategy
from hvdplus_tensorflow import _session
from hvdplus_tensorflow._arrays import Tensor
from hvdplus_tensorflow._engines import horovod
from hvdplus_tensorflow._exchange import Exchange, in_xla

_SCOPES = itertools.count()
_EXCHANGES: dict[tuple[Any, ...], _Sources] = {}


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: Any, *args: Any, strategy: Strategy | str | None = None, **kwargs: Any
) -> Any:
    """Return a tape whose ``gradient()`` averages over the ranks.

    Without ``strategy``, and with Horovod as the engine, this is Horovod's own, with all its arguments. With a
    strategy the gradients travel in its codec; what the codec keeps from step to step belongs to the list of sources,
    so tapes may be made anew each step. ``accumulate`` belongs to an optimizer and is refused here.

    Args:
        gradtape: a ``tf.GradientTape`` that has recorded.
        *args: Horovod's arguments.
        strategy: a ``Strategy``, a codec spec or ``"codec,field=value,..."``.
        **kwargs: Horovod's arguments by name.
    """
    if strategy is None and (not _session.is_initialized() or _session.session().engine == "horovod"):
        return horovod().DistributedGradientTape(gradtape, *args, **kwargs)
    if args or kwargs:
        raise StrategyError(
            f"DistributedGradientTape takes Horovod's arguments ({len(args) + len(kwargs)} given) without strategy= "
            f"and with engine 'horovod' only; name codec and op in strategy=."
        )
    chosen = Strategy.of(strategy)
    if chosen.accumulate > 1:
        raise StrategyError(f"a tape cannot accumulate={chosen.accumulate} micro-batches; wrap an optimizer for that.")
    return _Tape(gradtape, chosen)


class _Tape:
    """Stands for a tape; only ``gradient`` differs."""

    def __init__(self, tape: Any, strategy: Strategy) -> None:
        self._tape, self._strategy = tape, strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **options: Any) -> Any:
        """Return the mean over ranks of the gradients, in the structure of ``sources``."""
        grads = self._tape.gradient(target, sources, output_gradients, **options)
        flat = tf.nest.flatten(sources)
        key = (self._strategy, *(id(source) for source in flat))
        if key not in _EXCHANGES:
            _EXCHANGES[key] = _Sources(flat, self._strategy)
        return tf.nest.pack_sequence_as(sources, _EXCHANGES[key].mean(tf.nest.flatten(grads)))


class _Sources:
    """The exchange that belongs to a list of sources."""

    def __init__(self, sources: Sequence[Any], strategy: Strategy) -> None:
        self.sources = sources  # kept, so that their ids stay theirs
        self.session = _session.session()
        with tf.init_scope():  # the first gradient() may be one that is being traced
            self.session.meet()
            numbers = sum(math.prod(source.shape) for source in map(_plain, sources))
            strategy = autotune.chosen(strategy, self.session, self.session.collectives, numbers)
        self.strategy = strategy
        self.scope = f"tape{next(_SCOPES)}"
        self.stats = Stats()
        parameters = [
            Parameter(f"{i}:{s.name}" if hasattr(s, "name") else str(i), tuple(s.shape), s.dtype.name)
            for i, s in enumerate(map(_plain, sources))
        ]
        self.plan = plan(parameters, strategy)
        self.agreed = False
        with tf.init_scope():  # no number of Python's: that stays in a graph what it was when it was traced
            self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.exchange = Exchange(
            self.plan, strategy, self.session, self.session.collectives, self.scope, self.stats, self._before,
            lambda tail: False,
        )  # fmt: skip

    def _before(self) -> float:
        if not self.agreed:
            self.agreed = True
            agree(describe(self.plan, self.strategy, "a gradient tape", False, self.exchange.asks), self.session.gather)
        return 1.0

    def mean(self, grads: Sequence[Any]) -> list[Any]:
        if self.session.world.size == 1:
            return list(grads)
        if in_xla():
            raise StrategyError(
                "jit_compile=True compiles the step with XLA, which cannot hold an exchange; leave it out."
            )
        dense = [None if g is None else tf.convert_to_tensor(g) for g in grads]
        means, _ = self.exchange(self._pack(dense), self.steps.read_value())
        self.steps.assign_add(1)
        found: dict[int, Tensor] = {}
        for bucket, mean in zip(self.plan.buckets, means, strict=True):
            for m in bucket.members:
                found[m.index] = tf.reshape(mean[m.offset : m.offset + m.count], self.sources[m.index].shape)
        shares = self._shares(means)
        missing = [i for i, g in enumerate(dense) if g is None]
        if missing and not tf.executing_eagerly():
            with tf.control_dependencies([tf.numpy_function(partial(self._refuse, missing), [shares], [])]):
                found = {i: tf.identity(mean) for i, mean in found.items()}
            used = [i not in missing for i in range(len(dense))]
        else:
            used = [i not in missing or bool(shares[i] > 0) for i in range(len(dense))]
        return [found.get(i, g) if used[i] else None for i, g in enumerate(dense)]

    def _shares(self, means: Sequence[Tensor]) -> Tensor:
        """Return which share of the ranks has a gradient for each source."""
        begin = self.plan.buckets[-1].flags_offset
        return tf.cast(means[-1][begin : begin + len(self.sources)], tf.float32)

    def _refuse(self, missing: Sequence[int], shares: NumPyArray) -> None:
        """Refuse a traced step that has no gradient here for a source that has one on other ranks."""
        for index in missing:
            if shares[index] > 0:
                name = self.plan.parameters[index].name
                raise ExchangeError(
                    f"source {name!r} has no gradient on rank {self.session.world.rank} and one on other ranks in a "
                    f"traced step; use it on all ranks (add 0 times it to the target), or take gradients eagerly."
                )

    def _pack(self, grads: Sequence[Any]) -> list[Tensor]:
        values = []
        for bucket in self.plan.buckets:
            parts = [
                tf.zeros([m.count], bucket.dtype) if grads[m.index] is None else tf.reshape(grads[m.index], [-1])
                for m in bucket.members
            ]
            if bucket.flags:
                parts.append(tf.constant([float(g is not None) for g in grads], bucket.dtype))
            values.append(self.exchange.joined(parts, bucket))
        return values


def _plain(source: Any) -> Any:
    return source if isinstance(source, tf.Variable | tf.Tensor) else source.value
