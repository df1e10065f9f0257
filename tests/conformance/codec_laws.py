"""The codecs under test, and what each promises. A later codec joins by one line in ``LAWS``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdplus import codecs
from hvdplus.codecs import Outcome
from hvdplus.collectives import AllReduce


@dataclass(frozen=True)
class Law:
    """What a codec promises for float32.

    The mean is within ``relative`` (of the largest number sent there by any rank) plus ``absolute`` of the mean over
    ranks of what was sent. ``wire`` is bytes a number, sent twice less one share, whatever the number of ranks.
    ``largest`` is what one rank may give so that the mean is still finite.
    """

    relative: float
    absolute: float
    wire: float
    largest: float = 1e38
    everywhere: bool = False  # the tolerance is relative to the largest number of the bucket
    torch: bool = True


LAWS = {
    "exact": Law(relative=2**-21, absolute=1e-44, wire=4),
    "fp16": Law(relative=2**-8, absolute=2**-22, wire=2, largest=65000),
    "bf16": Law(relative=2**-7, absolute=1e-39, wire=2),
    "signs": Law(relative=2**-20, absolute=1e-40, wire=4, largest=1e37, torch=False),
}


class Signs:
    """A user's codec: the sign of every number, and one scale that all ranks share."""

    def exchange(self, x, site):
        with np.errstate(over="ignore", invalid="ignore"):
            scale = yield AllReduce(np.abs(x, dtype=x.dtype).mean(keepdims=True), scale=1 / site.size)
            signs = np.copysign(np.ones_like(x), x)
            sent = scale * signs + (x - x)  # x - x keeps what is not finite
            mean = yield AllReduce(sent.copy(), scale=1 / site.size)
        return Outcome(mean, sent)


def register_signs() -> None:
    """Make ``Signs`` known; a second call does nothing."""
    if "signs" not in codecs.known():
        codecs.register("signs")(Signs)


def sent_of(outcomes, inputs):
    """What every rank sent, in float64; ``None`` means all of what it was given."""
    pairs = zip(outcomes, inputs, strict=True)
    return [np.asarray(x if o.sent is None else o.sent).astype(np.float64) for o, x in pairs]


def tolerance(law: Law, sent) -> np.ndarray:
    """How far the mean may be from the mean of ``sent``, number by number."""
    largest = np.max(np.abs(sent), axis=0)
    return law.relative * (largest.max() if law.everywhere else largest) + law.absolute
