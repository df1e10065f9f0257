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


def two_phase(
    chunks: A,
    encode: Callable[[A], A],
    decode: Callable[[A], A],
    site: Site[A],
    combine: Callable[[A], A] | None = None,
) -> Exchange[A]:
    """Average encoded chunks over the ranks.

    Args:
        chunks: encoded, shape ``(ranks, m)``; row i belongs to rank i.
        encode: turns ``(k,)`` numbers of fp32 into a row of ``m``.
        decode: turns ``(rows, m)`` into ``(rows, k)`` numbers of fp32 or better.
        site: where it happens.
        combine: turns the decoded rows ``(ranks, k)`` into their average ``(k,)``; their mean where it is not given.

    Returns:
        An outcome whose mean has shape ``(ranks * k,)``; ``sent`` is left to the caller.
    """
    mine = yield AllToAll(chunks)
    average = (combine or site.arrays.mean_rows)(decode(mine))
    everyone = yield AllGather(encode(average))
    return Outcome(site.arrays.flat(decode(everyone)))


def two_phase_cast(x: A, dtype: str, site: Site[A], divide: bool = False) -> Exchange[A]:
    """Average ``x`` (shape ``(n,)``) over the ranks, every number as two bytes of ``dtype`` on the wire.

    With ``divide`` every rank sends its share of the mean, so that what is too large for ``dtype`` may still go out.
    """
    arrays = site.arrays
    full, count = arrays.dtype(x), arrays.count(x)
    wide = full if full == "float64" else "float32"
    wire = arrays.to_bits(arrays.scaled(x, 1.0 / site.size) if divide else x, dtype)
    outcome = yield from two_phase(
        arrays.rows(wire, site.size),
        lambda average: arrays.to_bits(average, dtype),
        lambda rows: arrays.from_bits(rows, dtype, wide),
        site,
        (lambda shares: arrays.scaled(arrays.mean_rows(shares), site.size)) if divide else None,
    )
    mean = arrays.cast(arrays.head(outcome.mean, count), full)
    if not site.keep_sent:
        return Outcome(mean)
    sent = arrays.from_bits(wire, dtype, full)
    return Outcome(mean, arrays.scaled(sent, site.size) if divide else sent)
