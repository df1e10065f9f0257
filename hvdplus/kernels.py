"""Fused loops for fp32 arrays in host memory (numba): a codec's work in one pass, where array operations take ten.

Each function has a twin, the codec's own array operations on NumPy arrays: it gives the same bits, and is what runs
where numba is absent. The interpreter is free meanwhile (``nogil``), and compiled code is kept in numba's cache. The
arithmetic of half precision follows the public-domain conversions of Fabian Giesen.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from hvdplus.arrays import SAMPLE, NumPyArray, NumPyArrays, quiet, sample_rank

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger("hvdplus")

try:
    import numba
except ImportError:  # an optional speed-up
    numba = None


@functools.cache
def available() -> bool:
    """Whether numba is there; says so once where it is not."""
    if numba is None:
        log.warning(
            "hvdplus: numba is not installed, so codecs run on array operations, several times slower on CPUs; "
            "pip install numba."
        )
    return numba is not None


def _compiled(function: F) -> F:
    if numba is None:
        return function
    return numba.njit(nogil=True, cache=True, error_model="numpy")(function)  # type: ignore[no-any-return]


def _summing(function: F) -> F:
    """Compile a sum whose order is free, so that it runs on vectors."""
    if numba is None:
        return function
    return numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc"})(function)  # type: ignore[no-any-return]


class HostArrays(NumPyArrays):
    """NumPy arrays worked on by compiled loops wherever there is one."""

    def hosts(self, x: NumPyArray) -> bool:
        """Whether the loops take ``x``."""
        return x.dtype == np.float32 and available()


_INFINITY = 0x7F800000
_TILE = 4096  # numbers that stay in the innermost cache between two passes
_MAGNITUDE = 0x7FFFFFFF  # all bits of an fp32 but its sign; as integers they order numbers by size, NaN above infinity


# -- quantisers: numbers to rows of bytes ---------------------------------------------------------------------------

_KINDS = {"onebit": 0, "ternary": 1, "whole": 2}  # how a block's codes are found
_ONEBIT, _TERNARY = 0, 1


@_compiled
def encode(
    x: Any, residual: Any, wire: Any, lost: Any, kind: int, bits: int, limit: int, blocks: int, length: int
) -> None:
    """Write ``x + residual`` into ``wire`` and what that loses into ``lost``.

    Args:
        x: fp32 ``(count,)``.
        residual: the same, or empty for none.
        wire: uint8 ``(rows, blocks * length * bits / 8 + 2 * blocks)``: each row the codes of ``blocks`` blocks of
            ``length`` numbers, then their scales in bf16. Beyond ``count`` numbers are taken for 0.
        lost: fp32 ``(count,)``; it may be ``x`` or ``residual``.
        kind: 0 (signs), 1 (signs of the large ones) or 2 (multiples of the scale).
        bits: to a code.
        limit: the largest multiple.
        blocks: in a row.
        length: of a block.
    """
    count, each = x.size, 8 // bits
    width, many = blocks * length // each, max(_TILE // length, 1)
    codes = np.empty(many * length, np.uint8)
    for row in range(wire.shape[0]):
        out, scales = wire[row, :width], wire[row, width:].view(np.uint16)
        for first in range(0, blocks, many):
            number = min(many, blocks - first)
            begin = min((row * blocks + first) * length, count)
            end = min(begin + number * length, count)
            part = lost[begin:end]  # loops over parts run on vectors, loops over places do not
            _add(x[begin:end], residual[begin:end], part)
            for i in range(number):
                piece, code = part[i * length : (i + 1) * length], codes[i * length : (i + 1) * length]
                if kind == _ONEBIT:
                    scale = _bf16(_mean_size(_total_size(piece), length, piece.size))
                    _signs(piece, scale, code)
                elif kind == _TERNARY:
                    scale = _ternary(piece, length, code)
                else:
                    scale = _bf16(_largest(piece.view(np.uint32)) * np.float32(1.0 / limit))
                    _multiples(piece, scale, limit, code)
                scales[first + i] = _upper_bits(scale)
            place = first * length // each
            _pack(codes[: number * length], bits, out[place : place + number * length // each])


def encode_head(x: Any, residual: Any, wire: Any, lost: Any, real: int, kind: str, **shape: int) -> None:
    """``encode`` the first ``real`` numbers; of the others nothing is lost."""
    encode(x[:real], residual[:real], wire, lost[:real], kind=_KINDS[kind], **shape)
    lost[real:] = 0


@_compiled
def _bf16(value: Any) -> Any:
    """Round an fp32 to bf16's precision; a NaN stays one."""
    bits = np.float32(value).view(np.uint32)
    if bits & np.uint32(_MAGNITUDE) > np.uint32(_INFINITY):
        return np.uint32(bits & np.uint32(0xFFFF0000) | np.uint32(0x400000)).view(np.float32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.uint32(rounded & np.uint32(0xFFFF0000)).view(np.float32)


@_compiled
def _upper_bits(value: Any) -> Any:
    return np.uint16(np.float32(value).view(np.uint32) >> np.uint32(16))


@_compiled
def _add(x: Any, residual: Any, out: Any) -> None:
    if residual.size:
        for i in range(out.size):
            out[i] = x[i] + residual[i]
    else:
        for i in range(out.size):
            out[i] = x[i]


@_summing
def _total_size(x: Any) -> Any:
    total = 0.0
    for i in range(x.size):
        total += np.float64(abs(x[i]))
    return total


@_summing
def _total_kept(x: Any, threshold: Any) -> Any:
    """Return the sum of what is at least ``threshold`` (NaN where there is one), and how many those are."""
    total, number = 0.0, np.float32(0)
    for i in range(x.size):
        size = abs(x[i])
        kept = np.float32(1) if size >= threshold else np.float32(0)
        total += np.float64(size * kept)
        number += kept
    return total, np.float64(number)


@_compiled
def _largest(bits: Any) -> Any:
    largest = np.uint32(0)
    for i in range(bits.size):
        size = np.uint32(bits[i] & np.uint32(_MAGNITUDE))
        largest = size if size > largest else largest
    return np.uint32(largest).view(np.float32)


@_compiled
def _mean_size(total: Any, length: int, count: int) -> Any:
    """Return the mean over ``count`` numbers of a block of ``length``, rounded where the twin rounds."""
    mean = np.float32(total / length)
    return mean if count in (length, 0) else mean * np.float32(length / count)


@_compiled
def _signs(x: Any, scale: Any, codes: Any) -> None:
    for i in range(x.size):
        value = x[i]
        codes[i] = value >= 0
        x[i] = value - (scale if value >= 0 else -scale)
    if x.size < codes.size:
        codes[x.size :] = 1


@_compiled
def _ternary(x: Any, length: int, codes: Any) -> Any:
    threshold = _mean_size(_total_size(x), length, x.size) * np.float32(0.7)
    total, number = _total_kept(x, threshold)
    if threshold <= 0:
        number += length - x.size  # the twin counts filling
    kept, mean = np.float32(number / length), np.float32(total / length)
    scale = _bf16(mean / kept if kept != 0 else mean * np.float32(0))
    for i in range(x.size):
        value = x[i]
        above = np.float32(1) if value >= threshold else np.float32(0)
        level = above - np.float32(1) if -value >= threshold else above
        codes[i] = np.uint8(np.int32(level + np.float32(1)))
        x[i] = value - level * scale
    if x.size < codes.size:
        codes[x.size :] = 1
    return scale


@_compiled
def _multiples(x: Any, scale: Any, limit: int, codes: Any) -> None:
    zero = limit + 1
    origin = np.float32(zero)
    divisor = scale if scale != 0 else np.float32(np.inf)
    for i in range(x.size):
        value = x[i]
        level = min(max(np.rint(value / divisor), np.float32(-limit)), np.float32(limit))
        codes[i] = np.uint8(np.int32(level + origin))
        x[i] = value - level * scale
    if x.size < codes.size:
        codes[x.size :] = zero


@_compiled
def _pack(codes: Any, bits: int, out: Any) -> None:
    if bits == 1:
        words = codes.view(np.uint64)
        for k in range(out.size):  # one product moves the lowest bits of eight bytes beside one another
            out[k] = words[k] * np.uint64(0x0102040810204080) >> np.uint64(56)
    elif bits == 2:
        four = codes.view(np.uint32)
        for k in range(out.size):
            word = np.uint32(four[k] | four[k] >> np.uint32(6))
            out[k] = np.uint8(word) | np.uint8(word >> np.uint32(12))
    elif bits == 4:
        two = codes.view(np.uint16)
        for k in range(out.size):
            out[k] = np.uint8(two[k] | two[k] >> np.uint16(4))
    else:
        for k in range(out.size):
            out[k] = codes[k]


# -- quantisers: rows of bytes to their mean --------------------------------------------------------------------------


@_compiled
def decode(rows: Any, mean: Any, alarm: Any, bits: int, zero: int, limit: int, blocks: int, length: int) -> None:
    """Write the mean of encoded rows.

    Args:
        rows: uint8 ``(ranks, m)`` as ``encode`` writes them.
        mean: fp32 ``(count,)``, at most a row's numbers.
        alarm: fp32 ``(1,)``: 0 where every number is finite, else NaN.
        bits: to a code.
        zero: the code that stands for 0; of one bit, 0 and 1 stand for -1 and 1.
        limit: the largest level.
        blocks: in a row.
        length: of a block.
    """
    each = 8 // bits
    width, factor, many = blocks * length // each, np.float32(1.0 / rows.shape[0]), max(_TILE // length, 1)
    worst = np.float32(0)
    codes = np.empty(many * length, np.uint8)
    for first in range(0, blocks, many):
        number = min(many, blocks - first)
        begin = min(first * length, mean.size)
        part = mean[begin : min(begin + number * length, mean.size)]
        for row in range(rows.shape[0]):
            place = first * length // each
            _unpack(rows[row, place : place + number * length // each], bits, codes[: number * length])
            for i in range(number):
                at = width + 2 * (first + i)
                scale = _bf16_value(rows[row, at], rows[row, at + 1])
                worst += scale * np.float32(limit) * np.float32(0)
                share = scale * factor
                piece, code = part[i * length : (i + 1) * length], codes[i * length : (i + 1) * length]
                if bits == 1:
                    _put_signs(code, share, piece, row > 0)
                else:
                    _put_levels(code, share, zero, piece, row > 0)
    alarm[0] = worst


def decode_rows(rows: Any, mean: Any, alarm: Any, blocks: int, length: int, **shape: int) -> None:
    """``decode`` rows that each stand for other numbers, one row's behind the other's."""
    chunk, found = blocks * length, np.zeros(1, np.float32)
    alarm[0] = 0
    for i, row in enumerate(rows):
        decode(row[None], mean[i * chunk : (i + 1) * chunk], found, blocks=blocks, length=length, **shape)
        alarm[0] += found[0]


@_compiled
def _bf16_value(low: Any, high: Any) -> Any:
    return np.uint32(np.uint32(low) << np.uint32(16) | np.uint32(high) << np.uint32(24)).view(np.float32)


@_compiled
def _unpack(packed: Any, bits: int, codes: Any) -> None:
    if bits == 1:
        eight = codes.view(np.uint64)
        for k in range(packed.size):
            each = np.uint64(packed[k]) * np.uint64(0x0101010101010101) & np.uint64(0x8040201008040201)
            eight[k] = (each + np.uint64(0x7F7F7F7F7F7F7F7F)) >> np.uint64(7) & np.uint64(0x0101010101010101)
    elif bits == 2:
        four = codes.view(np.uint32)
        for k in range(packed.size):
            pairs = np.uint32(packed[k]) | np.uint32(packed[k]) << np.uint32(12)
            four[k] = (pairs | pairs << np.uint32(6)) & np.uint32(0x03030303)
    elif bits == 4:
        two = codes.view(np.uint16)
        for k in range(packed.size):
            two[k] = (np.uint16(packed[k]) | np.uint16(packed[k]) << np.uint16(4)) & np.uint16(0x0F0F)
    else:
        for k in range(packed.size):
            codes[k] = packed[k]


@_compiled
def _put_signs(codes: Any, scale: Any, out: Any, add: bool) -> None:
    if add:
        for i in range(out.size):
            out[i] += scale if codes[i] else -scale
    else:
        for i in range(out.size):
            out[i] = scale if codes[i] else -scale


@_compiled
def _put_levels(codes: Any, scale: Any, zero: int, out: Any, add: bool) -> None:
    origin = np.float32(zero)  # sums of integers are of 64 bits, which do not become floats on vectors
    if add:
        for i in range(out.size):
            out[i] += (np.float32(codes[i]) - origin) * scale
    else:
        for i in range(out.size):
            out[i] = (np.float32(codes[i]) - origin) * scale


# -- sparse codecs -----------------------------------------------------------------------------------------------------


@_compiled
def add(x: Any, residual: Any, whole: Any) -> Any:
    """Write ``x + residual`` (``residual`` empty: ``x``) into ``whole``, and return the largest size, NaN above all."""
    largest = np.uint32(0)
    for begin in range(0, x.size, _TILE):
        part = whole[begin : begin + _TILE]
        _add(x[begin : begin + _TILE], residual[begin : begin + _TILE], part)
        size = np.float32(_largest(part.view(np.uint32))).view(np.uint32)
        largest = size if size > largest else largest
    return np.uint32(largest).view(np.float32)


@_compiled
def add_and_collect(x: Any, residual: Any, whole: Any, threshold: int, places: Any) -> Any:
    """Write ``x + residual`` into ``whole`` and the first places whose size is at least ``threshold`` into ``places``.

    ``threshold`` is the bits of an fp32 without its sign, so NaN and infinity are above every number. Returns how many
    there are, which may be more than ``places`` (int32) has room for.
    """
    found, least = 0, np.uint32(threshold)
    for begin in range(0, x.size, _TILE):
        part = whole[begin : begin + _TILE]
        _add(x[begin : begin + _TILE], residual[begin : begin + _TILE], part)
        bits = part.view(np.uint32)
        for i in range(bits.size):
            if np.uint32(bits[i] & np.uint32(_MAGNITUDE)) >= least:
                if found < places.size:
                    places[found] = begin + i
                found += 1
    return found


@_compiled
def move_out(whole: Any, places: Any, values: Any) -> None:
    """Write ``whole``'s numbers at ``places`` into ``values``, and leave zeros there."""
    for k in range(places.size):
        values[k] = whole[places[k]]
        whole[places[k]] = 0


@_compiled
def add_at(values: Any, places: Any, share: Any, mean: Any) -> None:
    """Add ``values * share`` at ``places``."""
    factor = np.float32(share)
    for k in range(places.size):
        mean[places[k]] += values[k] * factor


@quiet
def encode_largest(x: NumPyArray, residual: NumPyArray, message: NumPyArray, lost: NumPyArray, kept: int) -> None:
    """Move the ``kept`` largest numbers of ``x + residual`` and their places from ``lost`` into ``message``.

    A threshold guessed from a sample leaves few candidates, of which the largest are found exactly; of equal ones
    the first, and what is not finite before all others.
    """
    threshold = _threshold(x, residual, kept)
    places = np.empty(min(2 * kept + 4096, x.size), np.int32)
    found = add_and_collect(x, residual, lost, threshold, places)
    places = places[:found] if kept <= found <= places.size else np.arange(x.size, dtype=np.int32)
    chosen = places[_largest_of(_sizes(lost[places]), kept)]
    values, where = np.split(message, [4 * kept])
    where.view(np.int32)[:] = chosen
    move_out(lost, chosen, values.view(np.float32))


def _threshold(x: NumPyArray, residual: NumPyArray, kept: int) -> int:
    """Return the size, as bits, that rather more than ``kept`` numbers of ``x + residual`` have, by a sample; or 0."""
    stride, wanted = x.size // SAMPLE, sample_rank(x.size, kept)
    if stride < 2 or not wanted:
        return 0
    sample = x[::stride] + residual[::stride] if residual.size else x[::stride].copy()
    return int(np.partition(_sizes(sample), -wanted)[-wanted])


def _sizes(x: NumPyArray) -> NumPyArray:
    """Return sizes as integers that are in the same order; NaN is as large as infinity."""
    sizes: NumPyArray = np.minimum(x.view(np.uint32) & np.uint32(_MAGNITUDE), np.uint32(_INFINITY))
    return sizes


def _largest_of(sizes: NumPyArray, kept: int) -> NumPyArray:
    least = np.partition(sizes, -kept)[-kept]
    above, level = np.flatnonzero(sizes > least), np.flatnonzero(sizes == least)
    return np.sort(np.concatenate([above, level[: kept - above.size]]))


@quiet
def mean_of_largest(everyone: NumPyArray, mean: NumPyArray, alarm: NumPyArray) -> None:
    """Write the mean over ranks of such messages, a rank's behind the other's."""
    mean[:] = 0
    alarm[:] = 0
    for message in everyone:
        values, places = np.split(message, [message.size // 2])
        add_at(values.view(np.float32), places.view(np.int32), 1.0 / len(everyone), mean)
        alarm += 0 * np.abs(values.view(np.float32)).max()


@quiet
def encode_drawn(
    x: NumPyArray,
    residual: NumPyArray,
    step: int,
    message: NumPyArray,
    lost: NumPyArray,
    places: NumPyArray,
    draw: Callable[[int], NumPyArray],
) -> None:
    """Move the numbers of ``x + residual`` at the places drawn from ``lost`` into ``message``, an alarm behind them."""
    places[:] = draw(int(step))
    message[-1] = add(x, residual, lost) * np.float32(0)
    move_out(lost, places, message[:-1])


@quiet
def spread_drawn(message: NumPyArray, places: NumPyArray, mean: NumPyArray, alarm: NumPyArray) -> None:
    """Write such a message's numbers to their places, and its alarm everywhere else."""
    mean[:] = message[-1]
    add_at(message[:-1], places, 1.0, mean)
    alarm[:] = 0 * np.abs(message).max()


# -- low rank: matrices (rows, columns) and a few vectors of either length ----------------------------


@_summing
def _dot(x: Any, y: Any) -> Any:
    total = np.float32(0)
    for i in range(x.size):
        total += x[i] * y[i]
    return total


@_compiled
def _add_multiple(x: Any, factor: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] += factor * x[i]


@_compiled
def project_left(x: Any, residual: Any, starts: Any, whole: Any, left: Any) -> None:
    """Write ``x + residual`` (``residual`` of no rows: ``x``), and ``starts @ whole.T``, both in one pass."""
    nothing = np.empty(0, np.float32)
    for row in range(x.shape[0]):
        _add(x[row], residual[row] if residual.shape[0] else nothing, whole[row])
        for k in range(starts.shape[0]):
            left[k, row] = _dot(starts[k], whole[row])


@_compiled
def project_right(bases: Any, whole: Any, right: Any) -> None:
    """Write ``bases @ whole``, and take ``bases.T`` times that off ``whole``."""
    right[:] = 0
    for row in range(whole.shape[0]):
        for k in range(bases.shape[0]):
            _add_multiple(whole[row], bases[k, row], right[k])
    for row in range(whole.shape[0]):
        for k in range(bases.shape[0]):
            _add_multiple(right[k], -bases[k, row], whole[row])


@_compiled
def expand(bases: Any, right: Any, mean: Any) -> None:
    """Write ``bases.T @ right``."""
    mean[:] = 0
    for row in range(mean.shape[0]):
        for k in range(bases.shape[0]):
            _add_multiple(right[k], bases[k, row], mean[row])


# -- half precision ----------------------------------------------------------------------------------------------------


@_compiled
def to_halves(x: Any, halves: Any, factor: float, brain: bool) -> None:
    """Write ``x * factor`` as the bits of bf16 (``brain``) or fp16, rounded to nearest even."""
    scale, bits = np.float32(factor), np.empty(_TILE, np.float32)
    for begin in range(0, x.size, _TILE):
        part = x[begin : begin + _TILE]
        scaled = bits[: part.size]
        for i in range(part.size):
            scaled[i] = part[i] * scale
        if brain:
            _to_brain(scaled.view(np.uint32), halves[begin : begin + _TILE])
        else:
            _to_half(scaled.view(np.uint32), scaled, halves[begin : begin + _TILE])


@_compiled
def _to_brain(bits: Any, out: Any) -> None:
    for i in range(out.size):
        word = bits[i]
        quiet = np.uint32(word >> np.uint32(16) | np.uint32(0x40))
        near = np.uint32((word + np.uint32(0x7FFF) + (word >> np.uint32(16) & np.uint32(1))) >> np.uint32(16))
        out[i] = quiet if np.uint32(word & np.uint32(_MAGNITUDE)) > np.uint32(_INFINITY) else near


@_compiled
def _to_half(bits: Any, x: Any, out: Any) -> None:
    for i in range(out.size):
        size = np.uint32(bits[i] & np.uint32(_MAGNITUDE))
        sign = np.uint32(bits[i] & np.uint32(0x80000000)) >> np.uint32(16)
        odd = size >> np.uint32(13) & np.uint32(1)
        normal = np.uint32(size + np.uint32(0xC8000FFF) + odd) >> np.uint32(13)
        small = np.uint32(np.float32(abs(x[i]) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000))
        large = np.uint32(0x7E00) if size > np.uint32(_INFINITY) else np.uint32(0x7C00)
        half = small if size < np.uint32(0x38800000) else normal
        out[i] = (large if size >= np.uint32(0x47800000) else half) | sign


@_compiled
def mean_of_halves(rows: Any, mean: Any, factor: float, brain: bool) -> None:
    """Write the sum over rows of halves (bits, ``(ranks, m)``) times ``factor``; ``mean`` has at most ``m`` numbers."""
    scale, buffer = np.float32(factor), np.empty(_TILE, np.float32)
    for begin in range(0, mean.size, _TILE):
        part = mean[begin : begin + _TILE]
        numbers = buffer[: part.size]
        for row in range(rows.shape[0]):
            bits = rows[row, begin : begin + part.size]
            if brain:
                _from_brain(bits, numbers.view(np.uint32))
            else:
                _from_half(bits, numbers.view(np.uint32))
            if row == 0:
                for i in range(part.size):
                    part[i] = numbers[i] * scale
            else:
                for i in range(part.size):
                    part[i] += numbers[i] * scale


@_compiled
def _from_brain(bits: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = np.uint32(bits[i]) << np.uint32(16)


@_compiled
def _from_half(bits: Any, out: Any) -> None:
    for i in range(out.size):
        size = np.uint32(np.uint32(bits[i] & np.uint16(0x7FFF)) << np.uint32(13))
        sign = np.uint32(np.uint32(bits[i] & np.uint16(0x8000)) << np.uint32(16))
        normal = np.uint32(size + np.uint32(0x38000000))
        large = np.uint32(size + np.uint32(0x70000000))
        lowest = np.uint32(0x38800000)
        small = np.float32(np.uint32(size + lowest).view(np.float32) - lowest.view(np.float32)).view(np.uint32)
        number = small if size < np.uint32(0x800000) else normal
        out[i] = (large if size >= np.uint32(0x0F800000) else number) | sign
