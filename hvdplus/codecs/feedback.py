"""Error feedback: what a codec lost this step is added to what it is given the next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from hvdplus.arrays import Arrays, Cell, Output
from hvdplus.codecs.contract import Codec, Exchange, FeedbackCodec, Outcome, Site

A = TypeVar("A")


@dataclass(frozen=True)
class ErrorFeedback:
    """A codec around a codec (Seide et al. 2014; Karimireddy et al. 2019).

    Per rank, what was given in all equals what was sent in all plus the residual. A step in which any number
    is not finite leaves the residual as it was: its update is to be skipped, so nothing was delivered.
    """

    inner: Codec
    lossy = True

    @property
    def reads_pieces(self) -> bool:
        """Whether the codec inside adds the residual itself, and reads pieces as it does."""
        return isinstance(self.inner, FeedbackCodec) and getattr(self.inner, "reads_pieces", False)

    def exchange(self, x: A, site: Site[A]) -> Exchange[A]:
        """Exchange ``x`` plus the residual, and keep what was not sent."""
        arrays = site.arrays
        residual = site.cell("residual", arrays.count(x), arrays.dtype(x))
        if isinstance(self.inner, FeedbackCodec):
            return (yield from self.inner.with_feedback(x, residual, site))
        whole = arrays.add(x, residual.read())
        given = arrays.copy(whole)  # the inner codec may write into what it gets
        outcome = yield from self.inner.exchange(whole, replace(site, keep_sent=True))
        sent = given if outcome.sent is None else outcome.sent
        lost = arrays.subtract(given, sent)
        kept = arrays.where_finite(lost, lost, residual.read())  # what was sent can overflow where the mean does not
        stage(residual, kept, outcome.mean, arrays)
        return Outcome(outcome.mean, sent)


def kept_before(residual: Cell[A] | None, arrays: Arrays[A]) -> A:
    """Return the residual's value, or nothing at all."""
    return arrays.zeros(0, "float32") if residual is None else residual.read()


def left_in(x: A, residual: Cell[A] | None, arrays: Arrays[A]) -> Output[A]:
    """Return where a host function writes what is left of ``x``."""
    return Output((arrays.count(x),), "float32", x if residual is None else residual.spare)


def stage(residual: Cell[A] | None, lost: A, alarm: A, arrays: Arrays[A]) -> None:
    """Write what was not sent into the residual, if there is one; where ``alarm`` is not finite, leave it as it was."""
    if residual is not None:
        residual.write(arrays.where_finite(alarm, lost, residual.read()))
