"""Fused loops for fp32 arrays in host memory (numba): a codec's work in one pass, where array operations take ten.

Each function has a twin, the codec's own array operations on NumPy arrays: it gives the same bits, and is what runs
where numba is absent. The interpreter is free meanwhile (``nogil``), and compiled code is kept in numba's cache. The
arithmetic of half precision follows the public-domain conversions of Fabian Giesen.
"""

from __future__ import annotations

import functools
import logging
import platform
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from hvdplus.arrays import SAMPLE, Numbers, NumPyArray, NumPyArrays, quiet, sample_rank

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
_FEW = 64  # numbers that are looked at together
_MAGNITUDE = 0x7FFFFFFF  # all bits of an fp32 but its sign; as integers they order numbers by size, NaN above infinity


# -- arrays in pieces -------------------------------------------------------------------------------------------------

# A gradient may lie in pieces, one behind the other. Loops get the pieces' addresses and the places where they end, and
# walk along them with a cursor, the number of the piece they are in. Addresses are good while the pieces are held.


def table(x: Numbers) -> tuple[NumPyArray, NumPyArray]:
    """Return the addresses (uint64) and ends (int64) of fp32 pieces, or of one array.

    Raises:
        ValueError: one is not fp32 without gaps, which loops over addresses would not notice.
    """
    pieces = [x] if isinstance(x, np.ndarray) else x
    for piece in pieces:
        if piece.dtype != np.float32 or not piece.flags.c_contiguous:
            raise ValueError(
                f"a piece has dtype {piece.dtype} and strides {piece.strides}; loops take float32 without gaps: "
                "copy it with numpy.ascontiguousarray(piece, numpy.float32)."
            )
    addresses = np.array([piece.__array_interface__["data"][0] for piece in pieces], np.uint64)
    return addresses, np.cumsum([piece.size for piece in pieces], dtype=np.int64)


if numba is not None:
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def _pointer(_context: Any, address: Any) -> Any:
        """Make an address a pointer to fp32."""
        kind = numba.types.CPointer(numba.types.float32)

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(numba.types.uint64), generate


@_compiled
def _piece(addresses: Any, ends: Any, cursor: int, begin: int, most: int) -> Any:
    """Return the numbers from place ``begin`` on, at most so many, up to the end of the cursor's piece."""
    first = ends[cursor - 1] if cursor else 0
    number = min(most, ends[cursor] - begin)
    return numba.carray(_pointer(np.uint64(addresses[cursor] + np.uint64(4 * (begin - first)))), (number,))


@_compiled
def _gather(addresses: Any, ends: Any, cursor: int, begin: int, residual: Any, out: Any) -> int:
    """Write numbers from place ``begin`` on, plus the residual if it is not empty, and return the cursor at the end."""
    done = 0
    while done < out.size:
        while ends[cursor] <= begin + done:
            cursor += 1
        piece = _piece(addresses, ends, cursor, begin + done, out.size - done)
        _add(piece, residual[done : done + piece.size], out[done : done + piece.size])
        done += piece.size
    return cursor


@_compiled
def _scatter(numbers: Any, addresses: Any, ends: Any, cursor: int, begin: int) -> int:
    """Write numbers to their places from ``begin`` on, and return the cursor at the end."""
    done = 0
    while done < numbers.size:
        while ends[cursor] <= begin + done:
            cursor += 1
        piece = _piece(addresses, ends, cursor, begin + done, numbers.size - done)
        _copy(numbers[done : done + piece.size], piece)
        done += piece.size
    return cursor


@_compiled
def _copy(x: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = x[i]


@_compiled
def _add(x: Any, residual: Any, out: Any) -> None:
    if residual.size:
        for i in range(out.size):
            out[i] = x[i] + residual[i]
    else:
        _copy(x, out)


# -- quantisers: numbers to rows of bytes ---------------------------------------------------------------------------

_KINDS = {"onebit": 0, "ternary": 1, "whole": 2}  # how a block's codes are found
_ONEBIT, _TERNARY = 0, 1


@_compiled
def encode(
    x: Any, ends: Any, residual: Any, wire: Any, lost: Any, kind: int, bits: int, limit: int, blocks: int, length: int
) -> None:
    """Write ``x + residual`` into ``wire`` and what that loses into ``lost``.

    Args:
        x: the pieces' addresses.
        ends: where they end; ``count`` numbers in all.
        residual: fp32 ``(count,)``, or empty for none.
        wire: uint8 ``(rows, blocks * length * bits / 8 + 2 * blocks)``: each row the codes of ``blocks`` blocks of
            ``length`` numbers in planes, then their scales in bf16. Beyond ``count`` numbers are taken for 0.
        lost: fp32 ``(count,)``; it may be ``residual``, or ``x`` where that is one piece.
        kind: 0 (signs), 1 (signs of the large ones) or 2 (multiples of the scale).
        bits: to a code.
        limit: the largest multiple.
        blocks: in a row.
        length: of a block.
    """
    count, many, cursor = ends[-1], max(_TILE // length, 1), 0
    width = blocks * length * bits // 8
    codes, padded = np.empty(many * length, np.uint8), np.empty(many * length, np.float32)
    scales, found = np.empty(many, np.float32), np.empty(many, np.float32)
    for row in range(wire.shape[0]):
        out, bits_of_scales = wire[row, :width], wire[row, width:].view(np.uint16)
        for first in range(0, blocks, many):
            number = min(many, blocks - first)
            size = number * length
            begin = min((row * blocks + first) * length, count)
            part = lost[begin : min(begin + size, count)]
            cursor = _gather(x, ends, cursor, begin, residual[begin : begin + part.size], part)
            tile = part
            if part.size < size:
                tile = padded[:size]
                tile[part.size :] = 0
                _copy(part, tile[: part.size])
            if kind == _ONEBIT:
                _signs(tile, codes[:size])
                _mean_sizes(tile, length, part.size, scales[:number])
                _round(scales[:number])
                _take_signs(tile, length, scales[:number])
            elif kind == _TERNARY:
                _mean_sizes(tile, length, part.size, found[:number])
                _scales_of_kept(tile, length, found[:number], scales[:number])
                _round(scales[:number])
                _take_kept(tile, length, found[:number], scales[:number], codes[:size])
            else:
                _largest_of_blocks(tile.view(np.uint32), length, scales[:number])
                _multiply(scales[:number], np.float32(1.0 / limit))
                _round(scales[:number])
                _take_multiples(tile, length, scales[:number], limit, codes[:size])
            if part.size < size:
                _copy(tile[: part.size], part)
            _put_scales(scales[:number], bits_of_scales[first : first + number])
            _pack(codes[:size], first * length, bits, out)


def encode_head(
    x: Numbers, residual: NumPyArray, wire: NumPyArray, lost: NumPyArray,
    real: int, kind: str, **shape: int,
) -> None:  # fmt: skip
    """``encode`` the first ``real`` numbers; of the others nothing is lost."""
    addresses, ends = table(x)
    encode(addresses, np.minimum(ends, real), residual[:real], wire, lost[:real], kind=_KINDS[kind], **shape)
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
def _round(scales: Any) -> None:
    for i in range(scales.size):
        scales[i] = _bf16(scales[i])


@_compiled
def _put_scales(scales: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = np.uint16(np.float32(scales[i]).view(np.uint32) >> np.uint32(16))


@_compiled
def _multiply(x: Any, factor: Any) -> None:
    for i in range(x.size):
        x[i] *= factor


# In these, places are unsigned, so that the compiler knows that none counts from the end, and loops run on vectors.


@_summing
def _mean_sizes(x: Any, length: int, real: int, means: Any) -> None:
    """Write the mean size of every block, over the first ``real`` numbers, rounded where the twin rounds."""
    for block in range(means.size):
        begin, total = np.uint64(block * length), 0.0
        for i in range(np.uint64(length)):
            total += np.float64(abs(x[begin + i]))
        mean, count = np.float32(total / length), real - block * length
        means[block] = mean * np.float32(length / count) if 0 < count < length else mean


@_summing
def _scales_of_kept(x: Any, length: int, thresholds: Any, scales: Any) -> None:
    """Write the mean of every block's numbers of at least 0.7 times its mean size, which becomes that threshold."""
    for block in range(scales.size):
        thresholds[block] *= np.float32(0.7)
        begin, threshold, total, number = np.uint64(block * length), thresholds[block], 0.0, np.float32(0)
        for i in range(np.uint64(length)):
            size = abs(x[begin + i])
            kept = np.float32(1) if size >= threshold else np.float32(0)
            total += np.float64(size * kept)
            number += kept
        share, mean = np.float32(np.float64(number) / length), np.float32(total / length)
        scales[block] = mean / share if share != 0 else mean * np.float32(0)


@_compiled
def _largest_of_blocks(bits: Any, length: int, scales: Any) -> None:
    for block in range(scales.size):
        begin, largest = np.uint64(block * length), np.uint32(0)
        for i in range(np.uint64(length)):
            size = np.uint32(bits[begin + i] & np.uint32(_MAGNITUDE))
            largest = size if size > largest else largest
        scales[block] = np.uint32(largest).view(np.float32)


@_compiled
def _largest(bits: Any) -> Any:
    largest = np.uint32(0)
    for i in range(bits.size):
        size = np.uint32(bits[i] & np.uint32(_MAGNITUDE))
        largest = size if size > largest else largest
    return np.uint32(largest).view(np.float32)


@_compiled
def _signs(x: Any, codes: Any) -> None:
    for i in range(x.size):
        codes[i] = x[i] >= 0


@_compiled
def _take_signs(x: Any, length: int, scales: Any) -> None:
    for block in range(scales.size):
        begin, scale = np.uint64(block * length), scales[block]
        for i in range(np.uint64(length)):
            value = x[begin + i]
            x[begin + i] = value - (scale if value >= 0 else -scale)


@_compiled
def _take_kept(x: Any, length: int, thresholds: Any, scales: Any, codes: Any) -> None:
    for block in range(scales.size):
        begin, threshold, scale = np.uint64(block * length), thresholds[block], scales[block]
        for i in range(np.uint64(length)):
            value = x[begin + i]
            above = np.float32(1) if value >= threshold else np.float32(0)
            level = above - np.float32(1) if -value >= threshold else above
            codes[begin + i] = np.uint8(np.int32(level + np.float32(1)))
        for i in range(np.uint64(length)):
            value = x[begin + i]
            above = np.float32(1) if value >= threshold else np.float32(0)
            x[begin + i] = value - (above - np.float32(1) if -value >= threshold else above) * scale


@_compiled
def _take_multiples(x: Any, length: int, scales: Any, limit: int, codes: Any) -> None:
    most, origin = np.float32(limit), np.float32(limit + 1)
    for block in range(scales.size):
        begin, scale = np.uint64(block * length), scales[block]
        divisor = scale if scale != 0 else np.float32(np.inf)
        for i in range(np.uint64(length)):
            value = x[begin + i]
            level = min(max(np.rint(value / divisor), -most), most)
            codes[begin + i] = np.uint8(np.int32(level + origin))
            x[begin + i] = value - level * scale


@_compiled
def _pack(codes: Any, place: int, bits: int, out: Any) -> None:
    """Put a row's codes from ``place`` on into its planes; lower planes have been there before."""
    done = 0
    while done < codes.size:
        plane, begin = divmod(place + done, out.size)
        number = min(codes.size - done, out.size - begin)
        if plane:
            _put_above(codes[done : done + number], np.uint64(plane * bits), out[begin : begin + number])
        else:
            _copy(codes[done : done + number], out[begin : begin + number])
        done += number


@_compiled
def _put_above(codes: Any, shift: Any, out: Any) -> None:
    whole = out.size - out.size % 8  # eight at a time: shifts of words run on vectors, those of bytes do not
    words, into = codes[:whole].view(np.uint64), out[:whole].view(np.uint64)
    for k in range(into.size):
        into[k] |= words[k] << shift
    for k in range(whole, out.size):
        out[k] |= np.uint8(codes[k] << shift)


# -- quantisers: rows of bytes to their mean --------------------------------------------------------------------------


@_compiled
def decode(
    rows: Any, mean: Any, ends: Any, alarm: Any, place: int, bits: int, zero: int, limit: int, blocks: int, length: int
) -> None:
    """Write the mean of encoded rows.

    Args:
        rows: uint8 ``(ranks, m)`` as ``encode`` writes them.
        mean: addresses of the pieces to write.
        ends: where they end.
        alarm: fp32 ``(1,)``: 0 where every number is finite, else NaN.
        place: of the rows' first number in ``mean``.
        bits: to a code.
        zero: what is taken off a code, or off twice a code of one bit, to make it a level.
        limit: the largest level.
        blocks: in a row.
        length: of a block.
    """
    width, factor, many = blocks * length * bits // 8, np.float32(1.0 / rows.shape[0]), max(_TILE // length, 1)
    ranks, origin, step = rows.shape[0], np.float32(zero), np.float32(2 if bits == 1 else 1)
    worst, cursor = np.float32(0), 0
    codes, others = np.empty(many * length, np.uint8), np.empty(many * length, np.uint8)
    scales, more = np.empty(many, np.float32), np.empty(many, np.float32)
    tile = np.empty(many * length, np.float32)
    for first in range(0, blocks, many):
        number = min(many, blocks - first)
        size, begin = number * length, place + first * length
        real = max(min(size, ends[-1] - begin), 0)
        while real and ends[cursor] <= begin:
            cursor += 1
        part = _piece(mean, ends, cursor, begin, size) if real else tile[:0]
        direct = part.size == size
        if not direct:
            part = tile[:size]
        for row in range(ranks):
            into, shares = (others, more) if row == 1 else (codes, scales)
            _unpack(rows[row, :width], first * length, bits, into[:size])
            worst += _take_scales(rows[row, width:], first, np.float32(limit), factor, shares[:number])
            if row == 1:
                _put_two(codes, others, length, step, origin, scales[:number], more, part)
            elif row > 1:
                _put_another(codes, length, step, origin, scales[:number], part)
            elif ranks == 1:
                _put_one(codes, length, step, origin, scales[:number], part)
        if not direct:
            cursor = _scatter(part[:real], mean, ends, cursor, begin)
    alarm[0] = worst


def decode_mean(rows: NumPyArray, mean: Numbers, alarm: NumPyArray, **shape: int) -> None:
    """``decode`` rows that are all ranks' messages."""
    decode(rows, *table(mean), alarm, place=0, **shape)


def decode_rows(rows: NumPyArray, mean: Numbers, alarm: NumPyArray, blocks: int, length: int, **shape: int) -> None:
    """``decode`` rows that each stand for other numbers, one row's behind the other's."""
    found, where = np.zeros(1, np.float32), table(mean)
    alarm[0] = 0
    for i, row in enumerate(rows):
        decode(row[None], *where, found, place=i * blocks * length, blocks=blocks, length=length, **shape)
        alarm[0] += found[0]


@_compiled
def _bf16_value(low: Any, high: Any) -> Any:
    return np.uint32(np.uint32(low) << np.uint32(16) | np.uint32(high) << np.uint32(24)).view(np.float32)


@_compiled
def _unpack(packed: Any, place: int, bits: int, codes: Any) -> None:
    """Take a row's codes from ``place`` on out of their planes."""
    done, mask = 0, np.uint8((1 << bits) - 1)
    while done < codes.size:
        plane, begin = divmod(place + done, packed.size)
        number = min(codes.size - done, packed.size - begin)
        _take_below(packed[begin : begin + number], np.uint64(plane * bits), mask, codes[done : done + number])
        done += number


@_compiled
def _take_below(packed: Any, shift: Any, mask: Any, codes: Any) -> None:
    whole, each = codes.size - codes.size % 8, np.uint64(mask) * np.uint64(0x0101010101010101)
    words, into = packed[:whole].view(np.uint64), codes[:whole].view(np.uint64)
    for k in range(into.size):
        into[k] = words[k] >> shift & each
    for k in range(whole, codes.size):
        codes[k] = np.uint8(packed[k] >> shift) & mask


@_compiled
def _accumulate(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] += x[i]


@_compiled
def _take_scales(tail: Any, first: int, limit: Any, factor: Any, shares: Any) -> Any:
    """Write scales times ``factor``, and return 0 where all their levels are finite, else NaN."""
    worst = np.float32(0)
    for i in range(shares.size):
        scale = _bf16_value(tail[2 * (first + i)], tail[2 * (first + i) + 1])
        worst += scale * limit * np.float32(0)
        shares[i] = scale * factor
    return worst


@_compiled
def _put_one(codes: Any, length: int, step: Any, zero: Any, scales: Any, out: Any) -> None:
    for block in range(scales.size):
        begin, scale = np.uint64(block * length), scales[block]
        for i in range(np.uint64(length)):
            out[begin + i] = (np.float32(codes[begin + i]) * step - zero) * scale


@_compiled
def _put_another(codes: Any, length: int, step: Any, zero: Any, scales: Any, out: Any) -> None:
    for block in range(scales.size):
        begin, scale = np.uint64(block * length), scales[block]
        for i in range(np.uint64(length)):
            out[begin + i] += (np.float32(codes[begin + i]) * step - zero) * scale


@_compiled
def _put_two(
    codes: Any, others: Any, length: int, step: Any, zero: Any, scales: Any, more: Any, out: Any
) -> None:  # in one loop, since two ranks are a frequent number
    for block in range(scales.size):
        begin, scale, another = np.uint64(block * length), scales[block], more[block]
        for i in range(np.uint64(length)):
            mine = (np.float32(codes[begin + i]) * step - zero) * scale
            out[begin + i] = mine + (np.float32(others[begin + i]) * step - zero) * another


# -- sparse codecs -----------------------------------------------------------------------------------------------------


@_compiled
def add(x: Any, ends: Any, residual: Any, whole: Any) -> Any:
    """Write ``x + residual`` (``residual`` empty: ``x``) into ``whole``, and return the largest size, NaN above all."""
    largest, cursor = np.uint32(0), 0
    for begin in range(0, whole.size, _TILE):
        part = whole[begin : begin + _TILE]
        cursor = _gather(x, ends, cursor, begin, residual[begin : begin + _TILE], part)
        size = np.float32(_largest(part.view(np.uint32))).view(np.uint32)
        largest = size if size > largest else largest
    return np.uint32(largest).view(np.float32)


@_compiled
def add_and_collect(x: Any, ends: Any, residual: Any, whole: Any, threshold: int, places: Any) -> Any:
    """Write ``x + residual`` into ``whole`` and the first places whose size is at least ``threshold`` into ``places``.

    ``threshold`` is the bits of an fp32 without its sign, so NaN and infinity are above every number. Returns how many
    there are, which may be more than ``places`` (int32) has room for.
    """
    found, least, cursor = 0, np.uint32(threshold), 0
    for begin in range(0, whole.size, _TILE):
        part = whole[begin : begin + _TILE]
        cursor = _gather(x, ends, cursor, begin, residual[begin : begin + _TILE], part)
        bits = part.view(np.uint32)
        for few in range(0, bits.size, _FEW):
            group = bits[few : few + _FEW]
            if np.float32(_largest(group)).view(np.uint32) >= least:  # seldom: most groups are done with in one look
                for i in range(group.size):
                    if np.uint32(group[i] & np.uint32(_MAGNITUDE)) >= least:
                        if found < places.size:
                            places[found] = begin + few + i
                        found += 1
    return found


@_compiled
def sampled(x: Any, ends: Any, residual: Any, stride: int, sample: Any) -> None:
    """Write every ``stride``-th number of ``x + residual``."""
    cursor = 0
    for k in range(sample.size):
        place = k * stride
        while ends[cursor] <= place:
            cursor += 1
        sample[k] = _piece(x, ends, cursor, place, 1)[0]
        if residual.size:
            sample[k] += residual[place]


@_compiled
def move_out(whole: Any, places: Any, values: Any) -> None:
    """Write ``whole``'s numbers at ``places`` into ``values``, and leave zeros there."""
    for k in range(places.size):
        values[k] = whole[places[k]]
        whole[places[k]] = 0


@_compiled
def fill(value: Any, mean: Any, ends: Any) -> None:
    """Write ``value`` everywhere."""
    for cursor in range(ends.size):
        begin = ends[cursor - 1] if cursor else 0
        if ends[cursor] > begin:
            piece = _piece(mean, ends, cursor, begin, ends[cursor] - begin)
            for i in range(piece.size):
                piece[i] = value


@_compiled
def add_at(values: Any, places: Any, share: Any, mean: Any, ends: Any) -> None:
    """Add ``values * share`` at ``places``, which ascend."""
    factor, cursor, k = np.float32(share), 0, 0
    while k < places.size:
        while ends[cursor] <= places[k]:
            cursor += 1
        begin = ends[cursor - 1] if cursor else 0
        piece = _piece(mean, ends, cursor, begin, ends[cursor] - begin)
        while k < places.size and places[k] < ends[cursor]:
            piece[places[k] - begin] += values[k] * factor
            k += 1


@quiet
def encode_largest(x: Numbers, residual: NumPyArray, message: NumPyArray, lost: NumPyArray, kept: int) -> None:
    """Move the ``kept`` largest numbers of ``x + residual`` and their places from ``lost`` into ``message``.

    A threshold guessed from a sample leaves few candidates, of which the largest are found exactly; of equal ones
    the first, and what is not finite before all others.
    """
    where = table(x)
    threshold = _threshold(*where, residual, lost.size, kept)
    places = np.empty(min(2 * kept + 4096, lost.size), np.int32)
    found = add_and_collect(*where, residual, lost, threshold, places)
    places = places[:found] if kept <= found <= places.size else np.arange(lost.size, dtype=np.int32)
    chosen = places[_largest_of(_sizes(lost[places]), kept)]
    values, behind = np.split(message, [4 * kept])
    behind.view(np.int32)[:] = chosen
    move_out(lost, chosen, values.view(np.float32))


def _threshold(x: NumPyArray, ends: NumPyArray, residual: NumPyArray, count: int, kept: int) -> int:
    """Return the size, as bits, that rather more than ``kept`` numbers of ``x + residual`` have, by a sample; or 0."""
    stride, wanted = count // SAMPLE, sample_rank(count, kept)
    if stride < 2 or not wanted:
        return 0
    sample = np.empty(-(-count // stride), np.float32)
    sampled(x, ends, residual, stride, sample)
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
def mean_of_largest(everyone: NumPyArray, mean: Numbers, alarm: NumPyArray) -> None:
    """Write the mean over ranks of such messages, a rank's behind the other's."""
    where = table(mean)
    fill(np.float32(0), *where)
    alarm[:] = 0
    for message in everyone:
        values, places = np.split(message, [message.size // 2])
        add_at(values.view(np.float32), places.view(np.int32), 1.0 / len(everyone), *where)
        alarm += 0 * np.abs(values.view(np.float32)).max()


@quiet
def encode_drawn(
    x: Numbers,
    residual: NumPyArray,
    step: int,
    message: NumPyArray,
    lost: NumPyArray,
    places: NumPyArray,
    draw: Callable[[int], NumPyArray],
) -> None:
    """Move the numbers of ``x + residual`` at the places drawn from ``lost`` into ``message``, an alarm behind them."""
    places[:] = draw(int(step))
    message[-1] = add(*table(x), residual, lost) * np.float32(0)
    move_out(lost, places, message[:-1])


@quiet
def spread_drawn(message: NumPyArray, places: NumPyArray, mean: Numbers, alarm: NumPyArray) -> None:
    """Write such a message's numbers to their places, and its alarm everywhere else."""
    where = table(mean)
    fill(message[-1], *where)
    add_at(message[:-1], places, 1.0, *where)
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


def to_halves(x: Numbers, halves: NumPyArray, factor: float, brain: bool) -> None:
    """Write ``x * factor`` as the bits of bf16 (``brain``) or fp16, rounded to nearest even."""
    halved(*table(x), halves, factor, brain)


@_compiled
def halved(x: Any, ends: Any, halves: Any, factor: float, brain: bool) -> None:
    """Do as ``to_halves``."""
    scale, tile, nothing, cursor = np.float32(factor), np.empty(_TILE, np.float32), np.empty(0, np.float32), 0
    for begin in range(0, halves.size, _TILE):
        scaled = tile[: min(_TILE, halves.size - begin)]
        cursor = _gather(x, ends, cursor, begin, nothing, scaled)
        _multiply(scaled, scale)
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
def _to_half_by_bits(bits: Any, x: Any, out: Any) -> None:
    for i in range(out.size):
        size = np.uint32(bits[i] & np.uint32(_MAGNITUDE))
        sign = np.uint32(bits[i] & np.uint32(0x80000000)) >> np.uint32(16)
        odd = size >> np.uint32(13) & np.uint32(1)
        normal = np.uint32(size + np.uint32(0xC8000FFF) + odd) >> np.uint32(13)
        small = np.uint32(np.float32(abs(x[i]) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000))
        large = np.uint32(0x7E00) if size > np.uint32(_INFINITY) else np.uint32(0x7C00)
        half = small if size < np.uint32(0x38800000) else normal
        out[i] = (large if size >= np.uint32(0x47800000) else half) | sign


def mean_of_halves(rows: NumPyArray, mean: Numbers, factor: float, brain: bool) -> None:
    """Write the sum over rows of halves (bits, ``(ranks, m)``) times ``factor``; ``mean`` has at most ``m`` numbers."""
    sum_of_halves(rows, *table(mean), factor, brain)


@_compiled
def sum_of_halves(rows: Any, mean: Any, ends: Any, factor: float, brain: bool) -> None:
    """Do as ``mean_of_halves``."""
    scale, cursor = np.float32(factor), 0
    total, tile = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    for begin in range(0, ends[-1], _TILE):
        size = min(_TILE, ends[-1] - begin)
        for row in range(rows.shape[0]):
            numbers = tile[:size] if row else total[:size]
            if brain:
                _from_brain(rows[row, begin : begin + size], numbers.view(np.uint32))
            else:
                _from_half(rows[row, begin : begin + size], numbers.view(np.uint32))
            _multiply(numbers, scale)
            if row:
                _accumulate(numbers, total)
        cursor = _scatter(total[:size], mean, ends, cursor, begin)


@_compiled
def _from_brain(bits: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = np.uint32(bits[i]) << np.uint32(16)


@_compiled
def _from_half_by_bits(bits: Any, out: Any) -> None:
    for i in range(out.size):
        size = np.uint32(np.uint32(bits[i] & np.uint16(0x7FFF)) << np.uint32(13))
        sign = np.uint32(np.uint32(bits[i] & np.uint16(0x8000)) << np.uint32(16))
        normal = np.uint32(size + np.uint32(0x38000000))
        large = np.uint32(size + np.uint32(0x70000000))
        lowest = np.uint32(0x38800000)
        small = np.float32(np.uint32(size + lowest).view(np.float32) - lowest.view(np.float32)).view(np.uint32)
        number = small if size < np.uint32(0x800000) else normal
        out[i] = (large if size >= np.uint32(0x0F800000) else number) | sign


def _converts() -> bool:
    """Whether the processor converts halves itself; where it does not, a compiler would look for a library that does.

    Numba that was told to compile for another processor is not asked.
    """
    if numba is None or numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return False
    from llvmlite import binding  # type: ignore[import-untyped]

    return platform.machine() in ("aarch64", "arm64") or bool(binding.get_host_cpu_features().get("f16c"))


_to_half: Any = _to_half_by_bits
_from_half: Any = _from_half_by_bits

if _converts():
    from llvmlite import ir

    @intrinsic  # type: ignore[untyped-decorator]
    def _half(_context: Any, _number: Any) -> Any:
        """Round to the nearest half and return its bits."""

        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

        return numba.types.uint16(numba.types.float32), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def _whole(_context: Any, _bits: Any) -> Any:
        """Return the number whose bits as a half are these."""

        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

        return numba.types.float32(numba.types.uint16), generate

    @_compiled
    def _to_half_by_processor(_bits: Any, x: Any, out: Any) -> None:
        for i in range(out.size):
            out[i] = _half(x[i])

    @_compiled
    def _from_half_by_processor(bits: Any, out: Any) -> None:
        numbers = out.view(np.float32)
        for i in range(out.size):
            numbers[i] = _whole(np.uint16(bits[i]))

    _to_half, _from_half = _to_half_by_processor, _from_half_by_processor
