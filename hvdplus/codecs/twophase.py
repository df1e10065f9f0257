"""The two-phase exchange: all-to-all of chunks, average in fp32, all-gather of the encoded averages.

Its bytes do not grow with the number of ranks, and nothing is added on the wire (the scheme is that of
1-bit Adam's compressed all-reduce, Tang et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hvdplus.codecs.contract import Exchange, Outcome, Site
from hvdplus.collectives import AllGather, AllToAll

A = TypeVar("A")


def two_phase(chunks: A, encode: Callable[[A], A], decode: Callable[[A], A], site: Site[A]) -> Exchange[A]:
    """Average encoded chunks over the ranks.

    Args:
        chunks: encoded, shape ``(ranks, m)``; row i belongs to rank i.
        encode: turns ``(k,)`` numbers of fp32 into a row of ``m``.
        decode: turns ``(rows, m)`` into ``(rows, k)`` numbers of fp32 or better.
        site: where it happens.

    Returns:
        An outcome whose mean has shape ``(ranks * k,)``; ``sent`` is left to the caller.
    """
    mine = yield AllToAll(chunks)
    average = site.arrays.mean_rows(decode(mine))
    everyone = yield AllGather(encode(average))
    return Outcome(site.arrays.flat(decode(everyone)))


def two_phase_cast(x: A, dtype: str, site: Site[A]) -> Exchange[A]:
    """Average ``x`` (shape ``(n,)``) over the ranks, every number as two bytes of ``dtype`` on the wire."""
    arrays = site.arrays
    full, count = arrays.dtype(x), arrays.count(x)
    wide = full if full == "float64" else "float32"
    wire = arrays.to_bits(x, dtype)
    sent = arrays.from_bits(wire, dtype, full) if site.keep_sent else None
    outcome = yield from two_phase(
        arrays.rows(wire, site.size),
        lambda average: arrays.to_bits(average, dtype),
        lambda rows: arrays.from_bits(rows, dtype, wide),
        site,
    )
    return Outcome(arrays.cast(arrays.head(outcome.mean, count), full), sent)
