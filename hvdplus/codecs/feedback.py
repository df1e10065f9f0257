"""Error feedback: what a codec lost this step is added to what it is given the next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

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
        residual.write(arrays.where_finite(outcome.mean, kept, residual.read()))
        return Outcome(outcome.mean, sent)
