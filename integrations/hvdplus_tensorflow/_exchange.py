"""The exchange of a plan's buckets as one TensorFlow function, traced once: in a graph and eagerly it is the same."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvdplus.arrays import Cell, NumPyArray
from hvdplus.codecs import Codec, Site
from hvdplus.collectives import Collectives
from hvdplus.errors import ExchangeError
from hvdplus.plan import Bucket, Plan
from hvdplus.reducer import SAMPLE_EVERY, Reducer, alarm
from hvdplus.state import in_gradients
from hvdplus.stats import Stats
from hvdplus.strategy import Strategy
from hvdplus_tensorflow._arrays import Tensor, TensorFlowArrays
from hvdplus_tensorflow._engines import horovod
from hvdplus_tensorflow._session import Session

log = logging.getLogger("hvdplus")

# The forms in which an exchange is traced; which one runs is decided anew each time.
_PLAIN, _SAMPLED, _EXACT = range(3)

_PATIENCE = 2.0  # seconds after which a step is looked at from outside

NewCell = Callable[[str, int, str], Cell[Tensor]]


class TracedReducer(Reducer[Tensor]):
    """The reducer, where what it decides by looking at numbers is decided by the graph."""

    form = _PLAIN
    step: Any = 0
    weighed = False  # the last number of all says how many ranks have something to give

    def trace(self, form: int, values: list[Tensor], step: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the means, and the relative error (below 0 where it is not measured)."""
        self.form, self.step, self.stats = form, step, Stats()
        for value in values:
            self.start(value)
        outcomes = self._drain()
        finite = tf.reduce_all([self._arrays.all_finite(alarm(outcome)) for outcome in outcomes])
        error = self._traced_error(finite)
        self._flights = []
        self._settle(finite & (outcomes[-1].mean[-1] > 0) if self.weighed else finite)
        return self._delivered(outcomes), error

    def _choose(self, bucket: Bucket, site: Site[Tensor]) -> tuple[Codec, bool]:
        site.step = self.step
        if self.form == _EXACT:
            return self._exact, False
        return self._codecs[bucket.index], bucket.codec != "exact" and self.form == _SAMPLED

    def _settle(self, delivered: Tensor) -> None:
        """Keep the codecs' state if all means are finite and anybody gave something: else there will be no update."""
        for site in self._sites:
            for cell in site.cells.values():
                cell.settle(delivered)  # type: ignore[attr-defined]

    def _traced_error(self, finite: Tensor) -> Tensor:
        if self.form != _SAMPLED:
            return tf.constant(-1.0, tf.float64)
        lost, given = tf.constant(0.0, tf.float64), tf.constant(0.0, tf.float64)
        for flight in self._flights:
            if flight.size is not None:
                lost += tf.cast(self._lost_by(flight), tf.float64) ** 2
                given += flight.size**2
        return tf.where(finite & (given > 0), tf.sqrt(lost / given), tf.constant(-1.0, tf.float64))


class VariableCell(Cell[Tensor]):
    """A cell in a variable, which may be a Keras one; what a step writes is settled in the graph of that step.

    The variable is in the unit of true gradients. ``scale`` is by what the ones that are exchanged now are multiplied.
    """

    def __init__(self, variable: Any) -> None:
        super().__init__(variable)
        self.scale: Callable[[], Tensor | None] = lambda: None

    def read(self) -> Tensor:
        """Return the value the variable has at this place of the graph."""
        value, scale = tf.convert_to_tensor(self._value), self.scale()
        return value if scale is None else value * tf.cast(scale, value.dtype)

    def _true(self, value: Tensor) -> Tensor:
        scale = self.scale()
        return value if scale is None else value / tf.cast(scale, value.dtype)

    def commit(self) -> None:
        """Assign what was written, outside of any step."""
        staged, self._staged = self._staged, None
        if staged is not None:
            self._value.assign(self._true(staged))

    def settle(self, keep: Tensor) -> None:
        """Assign what was written if ``keep`` is true."""
        staged, self._staged = self._staged, None
        if staged is not None:
            kept = self._true(staged)
            tf.cond(keep, lambda: self._value.assign(kept), lambda: tf.convert_to_tensor(self._value))


def variable_cell(name: str, size: int, dtype: str) -> Cell[Tensor]:
    """Return a cell of zeros in a variable of its own."""
    with tf.init_scope():
        return VariableCell(tf.Variable(tf.zeros([size], dtype), trainable=False))


class Exchange:
    """Averages the buckets of a plan over the ranks.

    Args:
        before: called as an exchange begins; returns the factor on this rank's values, which is 1, or 0 or the number
            of ranks where one rank speaks for all.
        after: called with the means of the flags and notes; returns what the exchange gives back beside the means.
        weighed: the last of the notes is each rank's weight: where all are 0, what codecs keep stays as it was.
    """

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        session: Session,
        collectives: Collectives[Tensor],
        scope: str,
        stats: Stats,
        before: Callable[[], float],
        after: Callable[[NumPyArray], bool],
        new_cell: NewCell = variable_cell,
        weighed: bool = False,
    ) -> None:
        self._plan, self._strategy, self._session, self._stats = plan, strategy, session, stats
        self._before, self._after = before, after
        self._scale: Tensor | None = None  # of the exchange that is being traced

        def cell(name: str, size: int, dtype: str) -> Cell[Tensor]:
            made = new_cell(name, size, dtype)
            if isinstance(made, VariableCell) and in_gradients(name):
                made.scale = lambda: self._scale
            return made

        self._arrays = TensorFlowArrays()
        self.reducer = TracedReducer(plan, strategy, collectives, self._arrays, session.watch, scope, Stats(), cell)
        self.reducer.weighed = weighed
        self._costs: dict[int, Stats] = {}
        self._guard = Guard(session) if collectives.size > 1 and session.engine == "horovod" else None
        self._begin = 0.0
        self._what = f"the exchange of optimizer {scope}"
        self._lossy = any(bucket.codec != "exact" for bucket in plan.buckets)
        self._run = tf.function(self._traced, autograph=False)
        with tf.init_scope():
            self.asks = self.reducer.prepare()

    def __call__(self, values: list[Tensor], step: Tensor, scale: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """Return the means and what ``after`` returned.

        ``step`` is the number of exchanges before this one, ``scale`` what a loss scaling has multiplied ``values`` by.
        """
        scale = None if scale is None else tf.convert_to_tensor(scale)  # a variable's value at this place
        means, answer = self._run(list(values), tf.cast(step, tf.int64), scale)
        return list(means), answer

    def joined(self, parts: Sequence[Tensor], bucket: Bucket) -> Tensor:
        """Return the flat values of a bucket's members behind one another."""
        return parts[0] if len(parts) == 1 else self._arrays.strung(parts, bucket.count)

    def _traced(self, values: list[Tensor], step: Tensor, scale: Tensor | None) -> tuple[list[Tensor], Tensor]:
        self._scale = scale
        form, factor = tf.numpy_function(self._enter, [step], [tf.int32, tf.float32])
        values = _as_list(
            tf.cond(tf.equal(factor, 1.0), lambda: values, lambda: [_times(value, factor) for value in values])
        )
        values = [tf.ensure_shape(v, [b.count]) for v, b in zip(values, self._plan.buckets, strict=True)]
        forms = self._forms()
        branches = {form: partial(self._form, form, values, step) for form in forms}
        *means, error = branches[forms[0]]() if len(forms) == 1 else tf.switch_case(form, branches)
        means = [tf.ensure_shape(m, [b.count]) for m, b in zip(means, self._plan.buckets, strict=True)]
        self._scale = None
        tail = tf.cast(means[-1][self._plan.buckets[-1].flags_offset :], tf.float32)
        return means, tf.ensure_shape(tf.numpy_function(self._leave, [form, error, tail], tf.bool), [])

    def _forms(self) -> list[int]:
        """Return the forms that can occur."""
        lossy = [_PLAIN, _SAMPLED] if self._lossy else [_PLAIN]
        return [*lossy, _EXACT] if self._lossy and self._strategy.warmup_steps else lossy

    def _form(self, form: int, values: list[Tensor], step: Tensor) -> list[Tensor]:
        means, error = self.reducer.trace(form, values, step)
        self._costs[form] = self.reducer.stats
        return [*means, error]

    # -- what Python does each time -----------------------------------------------------------------------------

    def _enter(self, step: NumPyArray) -> tuple[NumPyArray, NumPyArray]:
        factor = self._before()
        self._session.watch.at(int(step), self._what)
        self._begin = time.perf_counter()
        if self._guard is not None:
            self._guard.enter()
        form = _SAMPLED if self._lossy and step % SAMPLE_EVERY == 0 else _PLAIN
        if self._lossy and step < self._strategy.warmup_steps:
            form = _EXACT
        return np.int32(form), np.float32(factor)  # type: ignore[return-value]

    def _leave(self, form: NumPyArray, error: NumPyArray, tail: NumPyArray) -> NumPyArray:
        if self._guard is not None:
            self._guard.leave()
        self._stats.seconds_wait += time.perf_counter() - self._begin
        self._stats.add(self._costs[int(form)])
        if error >= 0:
            self._stats.relative_error = float(error)
        self._session.watch.at(self._stats.steps, "outside an exchange")
        return np.bool_(self._after(tail))  # type: ignore[return-value]


class Guard:
    """Stands beside steps that run in a graph, where nobody looks up: says why one waits, and ends it when it must."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._inside, self._outside = threading.Event(), threading.Event()
        threading.Thread(target=self._stand, name="hvdplus-guard", daemon=True).start()

    def enter(self) -> None:
        """Note that an exchange begins."""
        self._outside.clear()
        self._inside.set()

    def leave(self) -> None:
        """Note that it ended."""
        self._inside.clear()
        self._outside.set()

    def done(self) -> bool:
        """Whether it ended."""
        return self._outside.is_set()

    def result(self) -> None:
        """Return nothing."""

    def _stand(self) -> None:
        while True:
            self._inside.wait()
            if self._outside.wait(_PATIENCE):
                continue
            try:
                self._session.watch.wait(self)
            except ExchangeError as error:
                log.error("hvdplus: %s", error)
                horovod().shutdown()  # the graph's pending ops now fail, and the step with them
                return


def in_xla() -> bool:
    """Whether the code that runs now is being traced for XLA."""
    if tf.executing_eagerly():
        return False
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def _as_list(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _times(value: Tensor, factor: Tensor) -> Tensor:
    """Return ``value * factor``, and 0 for a factor of 0 whatever the value: a product would keep a NaN."""
    return tf.where(tf.equal(factor, 0.0), tf.zeros_like(value), value * tf.cast(factor, value.dtype))
