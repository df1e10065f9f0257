"""Measures the link and the codecs on a job's own ranks, predicts what a step costs in each, and picks one."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np

from hvdplus import codecs
from hvdplus.arrays import NumPyArray
from hvdplus.codecs.auto import Auto
from hvdplus.collectives import AllGather, AllReduce, Collectives, Mapped, Pending, Ready, Request
from hvdplus.plan import Parameter, plan
from hvdplus.reducer import Reducer
from hvdplus.session import Framework, Session
from hvdplus.stats import Stats
from hvdplus.strategy import Strategy

A = TypeVar("A")

log = logging.getLogger("hvdplus")

_SIDE = 512  # a unit of what is exchanged is a matrix of so many rows and columns
_UNIT = _SIDE * _SIDE
_SIZES = ((1, 4), (4, 16), (16, 64))  # units exchanged over a slow, a middling and a fast link
_SLOW, _MIDDLING = 0.05, 0.01  # seconds that four units of fp16 take over these
_REPEATS = 3
_NOISE = 0.05  # a codec that loses more must be faster by so much


@dataclass(frozen=True)
class Cost:
    """What a codec costs on these ranks, for ``n`` numbers in a step.

    ``start + each * n`` seconds pass from the first bucket to the last mean, of which ``own * n`` are the codec's own
    work; ``bytes_each * n`` bytes leave a rank.
    """

    codec: str
    start: float
    each: float
    own: float
    bytes_each: float

    def seconds(self, numbers: int) -> float:
        """Predict a step with ``numbers`` gradients and no computation to hide behind."""
        return self.start + self.each * numbers

    def pays_below(self, other: Cost) -> float:
        """Return the bit/s of the link below which this one is faster than ``other``: where the bytes it saves take as
        long as the work it adds. Infinite where it adds none, 0 where it saves none.
        """
        saved, added = other.bytes_each - self.bytes_each, self.own - other.own
        if saved <= 0:
            return 0.0
        return math.inf if added <= 0 else 8 * saved / added


@dataclass(frozen=True)
class Survey:
    """What was measured: ranks, round trip of a small message in seconds, bit/s of the link, the codecs' costs."""

    ranks: int
    latency: float
    bits_per_second: float
    costs: tuple[Cost, ...]

    def cost(self, codec: str) -> Cost:
        """Return one codec's."""
        return next(cost for cost in self.costs if cost.codec == codec)

    def fastest(self, numbers: int, allowed: Sequence[str]) -> str:
        """Return the spec of the fastest codec allowed, given from gentle to harsh; a gentler one wins what is close.

        Example:
            >>> costs = [Cost("exact", 0, 8e-9, 0, 8), Cost("fp16", 0, 4.1e-9, 0, 4), Cost("int8", 0, 4e-9, 0, 2)]
            >>> Survey(2, 1e-4, 1e9, tuple(costs)).fastest(10**6, ["exact", "fp16", "int8"])
            'fp16'
        """
        best = allowed[0]
        for codec in allowed[1:]:
            if self.cost(codec).seconds(numbers) < (1 - _NOISE) * self.cost(best).seconds(numbers):
                best = codec
        return best

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=1)


def chosen(strategy: Strategy, session: Session[A], among: Collectives[A], numbers: int) -> Strategy:
    """Return ``strategy`` with the codec that ``auto`` stands for here; all ranks call this together.

    Args:
        strategy: returned as it is where its codec is another.
        session: this job.
        among: the ranks that will exchange.
        numbers: gradients in a step.
    """
    auto = codecs.make(strategy.codec)
    if not isinstance(auto, Auto):
        return strategy
    if among.size == 1:
        return replace(strategy, codec="exact")
    found = survey(session, auto.candidates, among)
    codec = found.fastest(numbers, auto.candidates)
    if among.rank == 0:
        predicted = ", ".join(f"{cost.codec} {cost.seconds(numbers) * 1e3:.3g}" for cost in found.costs)
        log.info(
            "hvdplus: codec auto is %s on this link of %.3g Gbit/s; ms a step predicted for %d gradients: %s.",
            codec, found.bits_per_second / 1e9, numbers, predicted,
        )  # fmt: skip
    return replace(strategy, codec=codec)


def survey(
    session: Session[A],
    specs: Sequence[str],
    among: Collectives[A] | None = None,
    progress: Callable[[str], object] = lambda codec: None,
) -> Survey:
    """Measure every codec of ``specs``, and the link, on these ranks; all ranks call this together and get the same.

    ``progress`` is called with each codec before its turn. It takes a few seconds on a fast network and more on a
    slow one.
    """
    collectives = among or session.collectives
    ranks = _Ranks(session, collectives)
    latency = ranks.agreed(min(ranks.timed(ranks.ping) for _ in range(20)))
    probe = _Exchange("fp16", 4, ranks.lent, session)
    first = ranks.agreed(min(ranks.timed(probe) for _ in range(2)))
    sizes = _SIZES[0 if first > _SLOW else 1 if first > _MIDDLING else 2]
    costs = []
    for spec in specs:
        progress(spec)
        costs.append(_cost(spec, sizes, ranks, session))
    exact = next((cost for cost in costs if cost.codec == "exact"), None) or _cost("exact", sizes, ranks, session)
    return Survey(collectives.size, latency, 8 * exact.bytes_each / exact.each, tuple(costs))


def _cost(spec: str, sizes: tuple[int, int], ranks: _Ranks, session: Session[Any]) -> Cost:
    """Measure two sizes, and lay a line through them."""
    times = []
    for units in sizes:
        exchange = _Exchange(spec, units, ranks.lent, session)
        exchange()  # loops are compiled, memory is taken
        times.append(ranks.agreed(min(ranks.timed(exchange) for _ in range(_REPEATS))))
    small, large = (units * _UNIT for units in sizes)
    each = max((times[1] - times[0]) / (large - small), 1e-12)
    alone = _Exchange(spec, sizes[1], _Echo(ranks.lent.size), session)
    alone()
    own = ranks.agreed(min(ranks.timed(alone) for _ in range(_REPEATS))) / large
    return Cost(spec, max(times[0] - each * small, 0.0), each, own, exchange.bytes_each)


class _Exchange:
    """One step's exchange of so many units of random numbers in one codec; a call is a step."""

    def __init__(self, spec: str, units: int, collectives: Collectives[NumPyArray], session: Session[Any]) -> None:
        from hvdplus.kernels import HostArrays  # numba, which takes its time

        strategy = Strategy(spec, min_compress=1)
        parameters = [Parameter(f"unit{i}", (_SIDE, _SIDE), "float32") for i in range(units)]
        self._stats = Stats()
        scope, watch = session.name("survey", collectives), session.watch
        planned = plan(parameters, strategy)
        self._reducer = Reducer(planned, strategy, collectives, HostArrays(), watch, scope, self._stats)
        generator = np.random.default_rng(collectives.rank)
        self._values = [generator.standard_normal(b.count, np.float32) * np.float32(1e-3) for b in planned.buckets]
        self._numbers = units * _UNIT

    def __call__(self) -> None:
        for value in self._values:
            self._reducer.start(value)
        for value, mean in zip(self._values, self._reducer.finish(), strict=True):
            if mean is not value:
                value[:] = mean
        self._reducer.commit()

    @property
    def bytes_each(self) -> float:
        """Bytes that left this rank, a number."""
        return self._stats.bytes_sent / self._stats.steps / self._numbers


class _Ranks:
    """The ranks of a survey: they begin together, and the slowest one's time counts."""

    def __init__(self, session: Session[Any], collectives: Collectives[Any]) -> None:
        self._session, self._collectives = session, collectives
        self.lent = _Lent(collectives, session.framework)

    def ping(self) -> None:
        """Let a small message go round."""
        name = self._session.name("ping", self._collectives)
        self._session.watch.wait(self.lent.start(AllReduce(np.zeros(1, np.float32)), name))

    def timed(self, function: Callable[[], object]) -> float:
        """Return the seconds a call takes here, after all ranks are there."""
        self.ping()
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin

    def agreed(self, seconds: float) -> float:
        """Return the largest of all ranks' numbers."""
        return max(float(text) for text in self._session.gather(repr(seconds).encode(), self._collectives))


class _Lent:
    """A framework's collectives for NumPy arrays."""

    def __init__(self, inner: Collectives[Any], framework: Framework[Any]) -> None:
        self._inner, self._framework = inner, framework
        self.rank, self.size, self.label = inner.rank, inner.size, inner.label

    def own(self) -> Pending[Collectives[NumPyArray]]:
        return Ready(self)

    def sums(self, value: NumPyArray, dtype: str) -> bool:
        return dtype not in ("float16", "bfloat16")

    def start(self, request: Request[NumPyArray], name: str) -> Pending[NumPyArray]:
        lent: Request[Any] = replace(request, value=self._framework.lend(request.value))
        return Mapped(self._inner.start(lent, name), self._framework.read)


class _Echo:
    """Answers every request at once as if all ranks were this one: what is left is the codec's own work."""

    rank = 0
    label = "echo"

    def __init__(self, size: int) -> None:
        self.size = size
        self._gathered: dict[tuple[Any, ...], NumPyArray] = {}  # rows that lie in memory, as an engine's do

    def own(self) -> Pending[Collectives[NumPyArray]]:
        return Ready(self)

    def sums(self, value: NumPyArray, dtype: str) -> bool:
        return dtype not in ("float16", "bfloat16")

    def start(self, request: Request[NumPyArray], name: str) -> Pending[NumPyArray]:
        if isinstance(request, AllGather):
            kind = (request.value.shape, request.value.dtype)
            if kind not in self._gathered:
                self._gathered[kind] = np.stack([request.value] * self.size)
            return Ready(self._gathered[kind])
        return Ready(request.value)
