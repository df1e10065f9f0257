"""The two-phase exchange: all-to-all of chunks, average in fp32, all-gather of the encoded averages.

Its bytes do not grow with the number of ranks, and nothing is added on the wire (the scheme is that of
1-bit Adam's compressed all-reduce, Tang et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hvdplus.arrays import Arrays, Cell
from hvdplus.codecs.contract import Exchange, Outcome, Site
from hvdplus.collectives import AllGather, AllToAll

A = TypeVar("A")


def two_phase(
    chunks: A,
    encode: Callable[[A], A],
    decode: Callable[[A], A],
    site: Site[A],
    combine: Callable[[A], A] | None = None,
    residual: Cell[A] | None = None,
    real: int | None = None,
) -> Exchange[A]:
    """Average encoded chunks over the ranks.

    Args:
        chunks: encoded, shape ``(ranks, m)``; row i belongs to rank i.
        encode: turns ``(k,)`` numbers of fp32 into a row of ``m``.
        decode: turns ``(rows, m)`` into ``(rows, k)`` numbers of fp32 or better.
        site: where it happens.
        combine: turns the decoded rows ``(ranks, k)`` into their average ``(k,)``; their mean where it is not given.
        residual: ``(k,)`` numbers of fp32: what encoding this rank's averages has lost so far, added to the next one.
        real: how many of this rank's ``k`` numbers are no filling, which is nothing to be averaged or kept.

    Returns:
        An outcome whose mean has shape ``(ranks * k,)``; ``sent`` is left to the caller.
    """
    arrays = site.arrays
    mine = yield AllToAll(chunks)
    average = (combine or arrays.mean_rows)(decode(mine))
    width = arrays.count(average)
    average = _cleared(average, real, arrays)
    if residual is not None:
        average = arrays.add(average, residual.read())
    everyone = yield AllGather(encode(average))
    mean = arrays.flat(decode(everyone))
    if residual is not None:
        delivered = arrays.part(mean, site.rank * width, (site.rank + 1) * width)
        lost = _cleared(arrays.subtract(average, delivered), real, arrays)
        residual.write(arrays.where_finite(mean, lost, residual.read()))
    return Outcome(mean)


def _cleared(x: A, real: int | None, arrays: Arrays[A]) -> A:
    """Return ``x`` with zeros behind the first ``real`` numbers."""
    return x if real is None else arrays.padded(arrays.head(x, real), arrays.count(x))


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
