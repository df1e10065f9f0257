"""The casting codecs: fp16 and bf16, two bytes a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from hvdplus.codecs.contract import Exchange, Outcome, Site
from hvdplus.codecs.exact import Exact
from hvdplus.codecs.twophase import averaged_cast
from hvdplus.collectives import AllReduce

A = TypeVar("A")


@dataclass(frozen=True)
class Cast:
    """Round to ``dtype`` for the wire.

    What fp16's range is too small for is divided by the number of ranks first, so neither a share nor a sum overflows
    where the mean does not. Where the wire does not add this dtype well (bf16 in Horovod, halves on a CPU), it goes
    through the two-phase exchange, which adds in fp32.
    """

    dtype: str
    reads_pieces = True
    lossy = False  # rounding to nearest loses 11 (fp16) or 8 (bf16) bits down: feedback rarely pays

    def exchange(self, x: A, site: Site[A]) -> Exchange[A]:
        """Average ``x`` over the ranks in ``dtype``."""
        arrays, full = site.arrays, site.arrays.dtype(x)
        if full == self.dtype:
            return (yield from Exact().exchange(x, site))
        if not site.collectives.sums(x, self.dtype):
            return (yield from averaged_cast(x, self.dtype, site, divide=self.dtype == "float16"))
        wire = arrays.cast(arrays.scaled(arrays.flat(x), 1.0 / site.size), self.dtype)
        sent = arrays.scaled(arrays.cast(wire, full), site.size) if site.keep_sent else None
        total = yield AllReduce(wire)
        return Outcome(arrays.cast(total, full), sent)
