"""Starts exchanges as buckets fill, finishes them in a fixed order, and counts the micro-batches of a window."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from hvdplus import codecs
from hvdplus.arrays import Arrays, Cell
from hvdplus.codecs import Codec, ErrorFeedback, Exchange, Outcome, Site
from hvdplus.collectives import AllGather, Collectives, Pending, ReduceScatter, Request, wire_bytes
from hvdplus.plan import Bucket, Plan
from hvdplus.state import Kept, in_gradients, put, take
from hvdplus.stats import Stats
from hvdplus.strategy import Strategy
from hvdplus.watch import Watch

A = TypeVar("A")

SAMPLE_EVERY = 100  # exchanges between two measurements of the relative error
_PART = 2**20  # numbers that are looked at together


class Window:
    """Counts the micro-batches of one rank: when a window is full, and what a call of ``step()`` means.

    Two kinds of loop exist. One calls ``step()`` after every micro-batch; a step inside a window is then held back.
    The classic one calls it once a window; it shows by several backward passes between two steps, and from then on
    every ``step()`` is real: a partial window is closed with the mean over the micro-batches it has.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.count = 0  # micro-batches since the last update
        self.since_step = 0  # backward passes since the last call of step()
        self.classic = False
        self.closed = False  # a partial window was closed by hand

    @property
    def full(self) -> bool:
        """Whether an update is due: the window's last micro-batch is in."""
        return self.closed or (self.count > 0 and self.count % self.length == 0)

    @property
    def closing(self) -> bool:
        """Whether the next micro-batch is the window's last."""
        return (self.count + 1) % self.length == 0

    def add(self) -> None:
        """Count one micro-batch."""
        self.count += 1
        self.since_step += 1
        self.closed = False
        self.classic |= self.length > 1 and self.since_step > 1

    def step(self) -> bool:
        """Note a call of ``step()``; return whether it is a real one."""
        self.since_step = 0
        return self.full or (self.classic and self.count > 0)

    def close(self) -> None:
        """Make a partial window count as full."""
        self.closed = True

    def restart(self) -> None:
        """Begin a new window."""
        self.count = 0
        self.since_step = 0
        self.closed = False

    def resize(self, length: int) -> None:
        """Give the windows that follow another length.

        Raises:
            ValueError: a window is half full.
        """
        if self.count % self.length:
            raise ValueError(
                f"accumulate can change between windows only; this one has {self.count % self.length} of {self.length} "
                f"micro-batches: finish it with flush() or discard it with zero_grad()"
            )
        self.closed = self.full  # one that waits for its step() stays full
        self.length = length


@dataclass
class _Flight(Generic[A]):
    """One bucket's codec on its way: its generator, and the requests it waits for."""

    bucket: Bucket
    given: A | None  # what a sampled codec without feedback was given
    size: Any  # the norm of what a sampled codec was given
    generator: Exchange[A]
    pending: list[Pending[A]] = field(default_factory=list)
    single: bool = True
    round: int = 0
    outcome: Outcome[A] | None = None


class Reducer(Generic[A]):
    """Averages the buckets of a plan over the ranks.

    Call ``start`` for every bucket in plan order as it is filled, then ``finish``. What codecs keep from one step to
    the next is provisional until ``commit``; ``rollback`` undoes it.
    """

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        collectives: Collectives[A],
        arrays: Arrays[A],
        watch: Watch,
        scope: str,
        stats: Stats,
        new_cell: Callable[[str, int, str], Cell[A]] | None = None,
    ) -> None:
        self.plan, self.scope, self.stats = plan, scope, stats
        self._strategy, self._collectives, self._arrays, self._watch = strategy, collectives, arrays, watch
        self._exact = codecs.make("exact")
        self._codecs = [_with_feedback(codecs.make(b.codec), strategy.feedback) for b in plan.buckets]
        self._sites = [self._site(bucket, new_cell) for bucket in plan.buckets]
        self._sampled = self._turns()
        self.finite = True  # the last means, as far as anybody had to know
        self._flights: list[_Flight[A]] = []

    def _turns(self) -> list[list[int]]:
        """Return which buckets are measured together: residuals tell of all at once, without them it takes copies."""
        lossy = [bucket.index for bucket in self.plan.buckets if bucket.codec != "exact"]
        kept = [index for index in lossy if isinstance(self._codecs[index], ErrorFeedback)]
        return [[*kept, index] for index in lossy if index not in kept] or [kept]

    def _site(self, bucket: Bucket, new_cell: Callable[[str, int, str], Cell[A]] | None) -> Site[A]:
        return Site(
            bucket.label,
            self._arrays,
            self._collectives,
            new_cell=new_cell,
            place=bucket.index,
            shapes=tuple(member.shape for member in bucket.members),
            feedback=self._strategy.feedback is not False,
        )

    @staticmethod
    def reads_pieces(bucket: Bucket, strategy: Strategy) -> bool:
        """Whether a bucket may be given in pieces, if its arrays are ones that ``Arrays.hosts``."""
        codec = _with_feedback(codecs.make(bucket.codec), strategy.feedback)
        return strategy.op != "sum" and codecs.reads_pieces(codec)

    @property
    def started(self) -> int:
        """How many buckets are on their way."""
        return len(self._flights)

    def start(self, value: A) -> None:
        """Send the next bucket of the plan; ``value`` (shape ``(bucket.count,)``) is given up until ``finish``.

        Where ``reads_pieces`` says so it may lie in pieces; the mean is then left in them if it can be.
        """
        bucket = self.plan.buckets[len(self._flights)]
        site = self._sites[bucket.index]
        codec, sample = self._choose(bucket, site)
        site.keep_sent = sample and not isinstance(codec, ErrorFeedback)
        begin = time.perf_counter()
        if site.keep_sent or not codecs.reads_pieces(codec):
            value = self._arrays.flat(value)
        given = self._arrays.copy(value) if site.keep_sent else None
        size = self._arrays.norm(value) if sample else None
        flight = _Flight(bucket, given, size, codec.exchange(value, site))
        self._flights.append(flight)
        self.stats.bytes_dense += wire_bytes_dense(self._arrays.nbytes(value), self._collectives.size)
        self._watch.at(self.stats.steps, bucket.label)
        self._advance(flight, None)
        self.stats.seconds_encode += time.perf_counter() - begin

    def _choose(self, bucket: Bucket, site: Site[A]) -> tuple[Codec, bool]:
        """Return the codec in which a bucket travels this time, and whether to measure what it loses."""
        site.step = self.stats.steps
        if site.step < self._strategy.warmup_steps:
            return self._exact, False
        turn, rest = divmod(self.stats.steps, SAMPLE_EVERY)
        return self._codecs[bucket.index], rest == 0 and bucket.index in self._sampled[turn % len(self._sampled)]

    def nudge(self) -> None:
        """Move the bytes of requests that move only when they are asked for; call it often while there is work."""
        for flight in self._flights:
            for pending in flight.pending:
                if getattr(pending, "moves_when_asked", False):
                    pending.done()

    def finish(self) -> list[A]:
        """Wait for all buckets, round by round and each round in plan order; return their means.

        Raises:
            ExchangeError: another rank failed, left or did not come in time.
        """
        outcomes = self._drain()
        sampled = any(flight.size is not None for flight in self._flights)
        if sampled or self._keeps_state():
            self.finite = all(self._arrays.all_finite(alarm(outcome)) for outcome in outcomes)
            if not self.finite:
                self.rollback()  # the update will be skipped: nothing was delivered
            elif sampled:
                self._sample_error()
        self._flights = []
        self.stats.steps += 1
        self._watch.at(self.stats.steps, "outside an exchange")
        return self._delivered(outcomes)

    def _drain(self) -> list[Outcome[A]]:
        """Advance all flights, round by round and each round in plan order, until every one has its outcome."""
        while waiting := [flight for flight in self._flights if flight.outcome is None]:
            for flight in waiting:
                self._watch.at(self.stats.steps, flight.bucket.label)
                begin = time.perf_counter()
                answers = [self._watch.wait(pending) for pending in flight.pending]
                middle = time.perf_counter()
                self._advance(flight, answers[0] if flight.single else answers)
                self.stats.seconds_wait += middle - begin
                self.stats.seconds_encode += time.perf_counter() - middle
        return [flight.outcome for flight in self._flights if flight.outcome is not None]

    def _delivered(self, outcomes: list[Outcome[A]]) -> list[A]:
        factor = float(self._collectives.size) if self._strategy.op == "sum" else 1.0
        return [o.mean if factor == 1.0 else self._arrays.scaled(o.mean, factor) for o in outcomes]

    def prepare(self) -> list[str]:
        """Make all state cells now, for who must know them early; return what ``asks`` returns."""
        return self._rehearsed(self.plan.buckets)

    def asks(self) -> list[str]:
        """Return what codecs of users ask for, a line for each request.

        Ranks that ask for different things would wait for each other for ever, so they compare these lines first.
        """
        return self._rehearsed([bucket for bucket in self.plan.buckets if not codecs.is_ours(bucket.codec)])

    def _rehearsed(self, buckets: Sequence[Bucket]) -> list[str]:
        """Exchange zeros that no other rank sees; return what codecs of users asked for."""
        lines: list[str] = []
        for bucket in buckets:
            site, zeros = self._sites[bucket.index], self._arrays.zeros(bucket.count, bucket.dtype)
            noted: list[str] = [] if codecs.is_ours(bucket.codec) else lines
            answer = partial(self._noted, f"{bucket.codec} in {bucket.label}", noted)
            run_alone(self._codecs[bucket.index].exchange(zeros, site), answer)
            site.rollback()
        return lines

    def _noted(self, who: str, lines: list[str], request: Request[A]) -> A:
        kind, value = type(request).__name__, request.value
        lines.append(f"{who} asks for {kind} of {self._arrays.count(value)} {self._arrays.dtype(value)}")
        return self._answered_alone(request)

    def _answered_alone(self, request: Request[A]) -> A:
        """Answer with something of the right shape."""
        arrays, size = self._arrays, self._collectives.size
        if not isinstance(request, AllGather | ReduceScatter):
            return request.value
        if isinstance(request, ReduceScatter):
            return arrays.zeros(arrays.count(request.value) // size, arrays.dtype(request.value))
        return arrays.rows(arrays.zeros(arrays.count(request.value) * size, arrays.dtype(request.value)), size)

    def carry(self, share: float) -> None:
        """Keep what the last exchange left where ``share`` of its means is given once more, in a mean with others."""
        for site in self._sites:
            for key, cell in site.cells.items():
                if in_gradients(key) and share != 1.0:
                    after, before = self._arrays.scaled(cell.staged, share), self._arrays.scaled(cell.read(), 1 - share)
                    cell.write(self._arrays.add(after, before))
        self.commit()

    def commit(self) -> None:
        """Keep what the last exchange left in the codecs' state."""
        for site in self._sites:
            site.commit()

    def rollback(self) -> None:
        """Undo what the last exchange left there."""
        for site in self._sites:
            site.rollback()

    def kept(self) -> Kept[A]:
        """Return a copy of what codecs keep, by parameter; of what an exchange has staged, nothing."""
        return take(self.plan, self._cells(), self._arrays, self._collectives.rank)

    def keep(self, kept: Kept[A]) -> tuple[Kept[A], list[str]]:
        """Overwrite all that codecs keep.

        Returns:
            What belongs to parameters that are not in the plan, and the names of what does not fit.
        """
        if kept and not self._keeps_state():
            self.prepare()
        found = put(self.plan, self._cells(), kept, self._arrays, self._collectives.rank, self._collectives.size)
        for site, values in zip(self._sites, found.cells, strict=True):
            site.rollback()
            for key, value in values.items():
                site.cells[key].write(value)
            site.commit()
        return found.waiting, found.misfits

    def _cells(self) -> list[dict[str, A]]:
        return [{key: cell.read() for key, cell in site.cells.items()} for site in self._sites]

    def _keeps_state(self) -> bool:
        return any(site.cells for site in self._sites)

    def _advance(self, flight: _Flight[A], answer: Any) -> None:
        """Run the codec until it asks again or is done."""
        try:
            asked = flight.generator.send(answer)
        except StopIteration as end:
            flight.outcome = end.value
            flight.pending = []
            return
        flight.single = not isinstance(asked, Sequence)
        requests: Sequence[Request[A]] = [asked] if flight.single else asked  # type: ignore[list-item, assignment]
        flight.pending = [self._send(flight, i, request) for i, request in enumerate(requests)]
        flight.round += 1

    def _send(self, flight: _Flight[A], index: int, request: Request[A]) -> Pending[A]:
        name = f"hvdplus.{self.scope}.{flight.bucket.index}.{flight.round}.{index}"
        self.stats.collectives += 1
        self.stats.bytes_sent += wire_bytes(request, self._arrays.nbytes(request.value), self._collectives.size)
        try:
            return self._collectives.start(request, name)
        except Exception as error:
            raise self._watch.translated(error) from error

    def _sample_error(self) -> None:
        """Note how far what was sent is from what was given, over all buckets that were sampled."""
        lost, given = 0.0, 0.0
        for flight in self._flights:
            if flight.size is not None:
                lost += self._lost_by(flight) ** 2
                given += flight.size**2
        if given > 0:
            self.stats.relative_error = (lost / given) ** 0.5

    def _lost_by(self, flight: _Flight[A]) -> Any:
        """Return the norm of what a sampled bucket was given and did not send; its residual grew by that."""
        arrays = self._arrays
        if flight.given is not None:
            assert flight.outcome is not None
            sent = flight.outcome.sent
            return 0.0 if sent is None else arrays.norm(arrays.subtract(flight.given, sent))
        residual = self._sites[flight.bucket.index].cells["residual"]
        after, before, total = residual.staged, residual.read(), 0.0
        for begin in range(0, flight.bucket.count, _PART):  # a difference takes memory
            end = min(begin + _PART, flight.bucket.count)
            lost = arrays.subtract(arrays.part(after, begin, end), arrays.part(before, begin, end))
            total = total + arrays.norm(lost) ** 2
        return total**0.5


def alarm(outcome: Outcome[A]) -> A:
    """Return numbers that are finite only where the mean is."""
    return outcome.mean if outcome.alarm is None else outcome.alarm


def wire_bytes_dense(nbytes: int, size: int) -> int:
    """Bytes one of ``size`` ranks sends in a ring all-reduce of ``nbytes``."""
    return 2 * nbytes * (size - 1) // size


def _with_feedback(codec: Codec, wanted: bool | None) -> Codec:
    """Compose error feedback around a codec that loses something, unless the strategy says otherwise."""
    lossy = getattr(codec, "lossy", True)
    exact = isinstance(codec, codecs.Exact)
    return ErrorFeedback(codec) if not exact and (lossy if wanted is None else wanted) else codec


def run_alone(exchange: Exchange[A], serve: Callable[[Request[A]], A]) -> Outcome[A]:
    """Drive one codec to its end with answers from ``serve``; for one-off exchanges and tests."""
    answer: Any = None
    while True:
        try:
            asked = exchange.send(answer)
        except StopIteration as end:
            outcome: Outcome[A] = end.value
            return outcome
        answer = [serve(r) for r in asked] if isinstance(asked, Sequence) else serve(asked)
