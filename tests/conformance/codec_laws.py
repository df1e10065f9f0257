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
    ranks of what was sent, once what the averaging side keeps ("server") is counted. ``wire`` is bytes a number, sent
    twice less one share, whatever the number of ranks, and ``row`` what a rank's share may have on top.
    ``largest`` is what one rank may give so that the mean is still finite.
    """

    relative: float
    absolute: float
    wire: float
    row: int = 4
    largest: float = 1e38
    everywhere: bool = False  # the tolerance is relative to the largest number of the bucket
    growth: float = 4  # a residual stays below so many times the largest number given
    torch: bool = True
    alike: float = 0  # how far torch may be from NumPy, relative to the largest number
    dense: bool = True  # every number is sent, not only a few of them
    drifts: bool = False  # what always cancels out between ranks stays with them: only their mean is bounded
    gathers: bool = False  # everything goes to every rank

    def bytes_sent(self, count: int, size: int) -> float:
        """The most that one rank sends."""
        whole = self.wire * (count + size - 1) + self.row * size + 16  # padded to equal rows, and a few on the side
        return (size - 1) * whole if self.gathers else 2 * (size - 1) / size * whole


# Codes and scales are decoded to the same number on both sides: only the sum over ranks is rounded.
ADDED = {"relative": 2**-19, "absolute": 1e-40, "everywhere": True}

LAWS = {
    "exact": Law(relative=2**-21, absolute=1e-44, wire=4, row=0),
    "fp16": Law(relative=2**-8, absolute=2**-22, wire=2, row=0, largest=65000),
    "bf16": Law(relative=2**-7, absolute=1e-39, wire=2, row=0),
    "int8": Law(**ADDED, wire=1 + 2 / 512, row=514),
    "int8:256,rounding=stochastic": Law(**ADDED, wire=1 + 2 / 256, row=258, torch=False),
    "int4": Law(**ADDED, wire=0.5 + 2 / 256, row=130),
    "int4:block=8": Law(**ADDED, wire=0.5 + 2 / 8, row=6),
    "ternary": Law(**ADDED, wire=0.25 + 2 / 128, row=34, growth=40),
    "onebit": Law(**ADDED, wire=0.125 + 2 / 256, row=34, growth=80),
    "onebit:64,averages=int4": Law(**ADDED, wire=0.5 + 2 / 64, row=34, growth=40),
    "ternary:16,averages=int8": Law(**ADDED, wire=1 + 2 / 16, row=18, growth=40),
    "onebit:8": Law(**ADDED, wire=0.125 + 2 / 8, row=3, growth=40),
    "topk:0.3": Law(**ADDED, wire=8 * 0.3, row=0, growth=12, dense=False, gathers=True),
    "randomk:0.3": Law(**ADDED, wire=4 * 0.3, row=0, growth=40, dense=False),
    "powersgd:1": Law(relative=2**-18, absolute=1e-38, everywhere=True, wire=4, largest=1e36, alike=1e-5),
    "tables": Law(
        relative=2**-18, absolute=1e-38, everywhere=True, wire=2, largest=1e36, growth=12, alike=1e-4, drifts=True
    ),
    "signs": Law(relative=2**-20, absolute=1e-40, wire=4, row=0, largest=1e37, growth=16, torch=False),
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


class Tables:
    """PowerSGD of rank 1 on a bucket that is a matrix of two rows, and what is left."""

    def exchange(self, x, site):
        half, rest = divmod(site.arrays.count(x), 2)
        site.shapes = ((2, half),) * (half > 0) + ((rest,),) * rest
        return (yield from codecs.make("powersgd:1").exchange(x, site))


OURS = {"signs": Signs, "tables": Tables}


def register_ours() -> None:
    """Make the codecs of this module known; a second call does nothing."""
    for name in OURS.keys() - set(codecs.known()):
        codecs.register(name)(OURS[name])


def sent_of(outcomes, inputs):
    """What every rank sent, in float64; ``None`` means all of what it was given."""
    pairs = zip(outcomes, inputs, strict=True)
    return [np.asarray(x if o.sent is None else o.sent).astype(np.float64) for o, x in pairs]


def server_of(sites, count):
    """What the averaging sides keep for later, number by number, in float64; 0 for a codec that has no such side."""
    kept = [site.cells["server"].read() for site in sites if "server" in site.cells]
    return np.concatenate(kept).astype(np.float64)[:count] if kept else np.zeros(count)


def tolerance(law: Law, sent) -> np.ndarray:
    """How far the mean may be from the mean of ``sent``, number by number."""
    largest = np.max(np.abs(sent), axis=0)
    return law.relative * (largest.max() if law.everywhere else largest) + law.absolute
