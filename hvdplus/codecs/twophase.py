"""How messages that cannot be added on the wire are averaged: the two-phase exchange, or one gathering of two ranks.

With more than two ranks: all-to-all of chunks, average in fp32, all-gather of the averages, encoded again. Its bytes do
not grow with the number of ranks (the scheme is that of 1-bit Adam's compressed all-reduce, Tang et al. 2021). Two
ranks send each other everything: as many bytes, one round less, and nothing is encoded twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from hvdplus.arrays import Arrays, Output
from hvdplus.codecs.contract import Exchange, Outcome, Site
from hvdplus.collectives import AllGather, AllToAll, Request

A = TypeVar("A")


def gathers(site: Site[A]) -> bool:
    """Whether the ranks are so few that each may send its whole message to all others."""
    return site.size <= 2


def two_phase(chunks: A, average: Callable[[A], A]) -> Generator[Request[A], Any, A]:
    """Have every rank average one chunk of everybody's message.

    Args:
        chunks: encoded, shape ``(ranks, m)``; row i belongs to rank i.
        average: turns the rows that arrive here, ``(ranks, m)``, into their average, encoded, ``(m',)``.

    Returns:
        All averages, ``(ranks, m')``; row i is rank i's.
    """
    chunks = yield AllToAll(chunks)
    averages = [average(chunks)]
    del chunks  # all buckets wait here: hold no more memory than the engine does
    everyone: A = yield AllGather(averages.pop())
    return everyone


def averaged_cast(x: A, dtype: str, site: Site[A], divide: bool = False) -> Exchange[A]:
    """Average ``x`` (shape ``(n,)``) over the ranks, every number as two bytes of ``dtype`` on the wire.

    With ``divide`` every rank sends its share of the mean, so that what is too large for ``dtype`` may still go out.
    """
    arrays, count = site.arrays, site.arrays.count(x)
    full = arrays.dtype(x)
    share, rest = (1.0 / site.size, 1.0) if divide else (1.0, 1.0 / site.size)
    wire = _bits(x, dtype, share, arrays)
    sent = arrays.scaled(arrays.from_bits(wire, dtype, full), 1.0 / share) if site.keep_sent else None
    message = [wire]
    del wire
    if gathers(site):
        rows = yield AllGather(message.pop())
        return Outcome(_numbers(rows, dtype, rest, x, arrays), sent)
    wide = full if full == "float64" else "float32"

    def average(rows: A) -> A:
        return arrays.to_bits(arrays.sum_rows(arrays.scaled(arrays.from_bits(rows, dtype, wide), rest)), dtype)

    everyone = yield from two_phase(arrays.rows(message.pop(), site.size), average)
    averages = arrays.shaped(arrays.head(arrays.flat(everyone), count), (1, count))
    return Outcome(_numbers(averages, dtype, 1.0, x, arrays), sent)


def _bits(x: A, dtype: str, factor: float, arrays: Arrays[A]) -> A:
    """Return the bits of ``x * factor`` in ``dtype``."""
    if not arrays.hosts(x):
        return arrays.to_bits(arrays.scaled(x, factor) if factor != 1.0 else x, dtype)
    from hvdplus import kernels

    to_halves = functools.partial(kernels.to_halves, factor=factor, brain=dtype == "bfloat16")
    (bits,) = arrays.on_host(to_halves, [x], [Output((arrays.count(x),), "int16")])
    return bits


def _numbers(rows: A, dtype: str, factor: float, x: A, arrays: Arrays[A]) -> A:
    """Return the sum over rows of bits times ``factor``, in ``x``'s dtype; it may take ``x``'s memory."""
    if not arrays.hosts(x):
        wide = arrays.dtype(x) if arrays.dtype(x) == "float64" else "float32"
        total = arrays.sum_rows(arrays.scaled(arrays.from_bits(rows, dtype, wide), factor))
        return arrays.cast(total, arrays.dtype(x))
    from hvdplus import kernels

    mean_of_halves = functools.partial(kernels.mean_of_halves, factor=factor, brain=dtype == "bfloat16")
    (mean,) = arrays.on_host(mean_of_halves, [rows], [Output((arrays.count(x),), "float32", x)])
    return mean
