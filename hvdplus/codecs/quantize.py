"""The quantising codecs: 8, 4, 2 or 1 bit a number and a scale a block, averaged in fp32."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hvdplus.arrays import Arrays, Cell, Output
from hvdplus.codecs.contract import Exchange, Outcome, Site
from hvdplus.codecs.feedback import kept_before, left_in, stage
from hvdplus.codecs.twophase import gathers, two_phase
from hvdplus.collectives import AllGather
from hvdplus.errors import StrategyError

A = TypeVar("A")

_SCALE = "bfloat16"  # fp32's range in two bytes; both sides use the rounded scale, so it costs next to nothing
_SCALE_BYTES = 2


@dataclass(frozen=True)
class Grid:
    """How ``count`` numbers are cut: a chunk for each rank, and each chunk into blocks of equal length.

    The blocks of all ranks together are a little longer than the numbers; zeros fill what is left at the end.
    """

    count: int
    ranks: int
    blocks: int
    length: int

    @classmethod
    def of(cls, count: int, ranks: int, block: int, unit: int) -> Grid:
        """Cut into blocks of at most ``block`` numbers, a multiple of ``unit`` (the numbers in a byte).

        Example:
            >>> Grid.of(1000, 2, 64, 8)
            Grid(count=1000, ranks=2, blocks=8, length=64)
            >>> Grid.of(3, 8, 64, 8)
            Grid(count=3, ranks=8, blocks=1, length=8)
        """
        share = max(-(-count // ranks), 1)
        blocks = -(-share // block)
        return cls(count, ranks, blocks, -(-share // (blocks * unit)) * unit)

    @property
    def chunk(self) -> int:
        """Numbers to a rank."""
        return self.blocks * self.length

    def row_bytes(self, bits: int) -> int:
        """Bytes of a chunk's codes and scales."""
        return self.chunk * bits // 8 + self.blocks * _SCALE_BYTES

    def real(self, rank: int) -> int:
        """How many numbers of a rank's chunk are no filling."""
        return min(max(self.count - rank * self.chunk, 0), self.chunk)


@dataclass(frozen=True)
class Quantizer:
    """What the codecs here share. ``bits`` to a number; a code is ``(level + zero) / step``.

    Two ranks send each other everything. More send every other one that rank's chunk, codes and scales in one message;
    each decodes what it got, averages in fp32, adds what it lost there before (its *server* residual) and sends the
    average encoded to all: in the same codec, or in the finer one that ``averages`` names.
    """

    block: int
    averages: str = ""
    bits: ClassVar[int]
    step: ClassVar[int] = 1
    zero: ClassVar[int]
    lossy: ClassVar[bool] = True
    reads_pieces: ClassVar[bool] = True
    kind: ClassVar[str]  # the compiled loop that finds the codes of a block
    limit: ClassVar[int] = 0

    def __post_init__(self) -> None:
        unit = 8 // self.bits
        if not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1 or self.block % unit:
            multiple = f" and a multiple of {unit}, the numbers in a byte" if unit > 1 else ""
            raise StrategyError(f"block={self.block!r} must be a whole number of at least {unit}{multiple}.")
        if self.averages not in ("", *self._finer()):
            known = " or ".join(map(repr, self._finer())) or "left out, since no codec is finer"
            raise StrategyError(f"averages={self.averages!r} must be {known}.")

    def _finer(self) -> list[str]:
        """Return the codecs whose codes have more bits."""
        return [name for name, kind in _KINDS.items() if kind.bits > self.bits]

    @property
    def _second(self) -> Quantizer:
        """The codec of averages; its blocks are this one's."""
        return _KINDS[self.averages](self.block) if self.averages else self

    def exchange(self, x: A, site: Site[A]) -> Exchange[A]:
        """Average ``x`` over the ranks."""
        return self.with_feedback(x, None, site)

    def with_feedback(self, x: A, residual: Cell[A] | None, site: Site[A]) -> Exchange[A]:
        """Average ``x`` plus the residual, if there is one, and stage what was not sent."""
        arrays, count = site.arrays, site.arrays.count(x)
        grid = Grid.of(count, 1 if gathers(site) else site.size, self.block, 8 // self.bits)
        wire, lost = self._encoded(x, residual, count, grid, site, 0)
        sent = self._sent(wire, x, grid, arrays) if site.keep_sent else None
        message = [wire]
        del wire  # what is on its way takes memory in every bucket: hold no more of it than the engine does
        if gathers(site):
            rows = yield AllGather(arrays.flat(message.pop()))
            mean, alarm = self._averaged(rows, count, grid, x, arrays)
        else:
            server = site.cell("server", grid.chunk) if site.feedback else None
            everyone = yield from two_phase(message.pop(), lambda rows: self._recoded(rows, server, grid, site))
            mean, alarm = self._second._strung(everyone, count, grid, x, arrays)
            if server is not None:
                stage(server, server.staged, alarm, arrays)
        stage(residual, lost, alarm, arrays)
        return Outcome(mean, sent, alarm)

    # -- each step, on host memory in one pass and elsewhere by array operations ------------------------------

    def _sent(self, wire: A, x: A, grid: Grid, arrays: Arrays[A]) -> A:
        """Return the numbers that ``wire`` stands for, ``x``'s dtype and count."""
        numbers = arrays.head(arrays.flat(self._decoded(wire, grid, arrays)), arrays.count(x))
        return arrays.cast(numbers, arrays.dtype(x))

    def _fused(self, x: A, arrays: Arrays[A]) -> bool:
        return arrays.hosts(x)

    def _encoded(self, x: A, residual: Cell[A] | None, real: int, grid: Grid, site: Site[A], phase: int) -> tuple[A, A]:
        """Return rows of bytes for ``x`` plus the residual, and what that loses, with as many numbers as ``x``."""
        arrays = site.arrays
        rows = 1 if phase else grid.ranks
        if self._fused(x, arrays):
            return self._encoded_on_host(x, residual, real, grid, rows, arrays)
        whole = x if residual is None else arrays.add(x, residual.read())
        numbers = arrays.padded(arrays.cast(whole, "float32"), rows * grid.chunk)
        wire = self._encode(numbers, real, grid, site, phase)
        if residual is None:
            return wire, whole
        return wire, arrays.subtract(whole, self._sent(wire, x, grid, arrays))

    def _encoded_on_host(
        self, x: A, residual: Cell[A] | None, real: int, grid: Grid, rows: int, arrays: Arrays[A]
    ) -> tuple[A, A]:
        from hvdplus import kernels

        encode = functools.partial(
            kernels.encode_head,
            real=real, kind=self.kind, bits=self.bits, limit=self.limit, blocks=grid.blocks, length=grid.length,
        )  # fmt: skip
        outputs = [Output((rows, grid.row_bytes(self.bits)), "uint8"), left_in(x, residual, arrays)]
        wire, lost = arrays.on_host(encode, [x, kept_before(residual, arrays)], outputs)
        return wire, lost

    def _recoded(self, rows: A, server: Cell[A] | None, grid: Grid, site: Site[A]) -> A:
        """Return the average of the rows that came here, encoded, and stage in ``server`` what that loses."""
        arrays, real = site.arrays, grid.real(site.rank)
        average, _ = self._averaged(rows, grid.chunk, grid, arrays.zeros(0, "float32"), arrays)
        average = arrays.padded(arrays.head(average, real), grid.chunk)
        wire, lost = self._second._encoded(average, server, real, grid, site, 1)
        if server is not None:
            server.write(arrays.padded(arrays.head(lost, real), grid.chunk))
        return arrays.flat(wire)

    def _averaged(self, rows: A, count: int, grid: Grid, x: A, arrays: Arrays[A]) -> tuple[A, A]:
        """Return the mean of encoded rows, in ``x``'s dtype and perhaps its memory, and whether all is finite."""
        if self._fused(x, arrays):
            return self._decoded_on_host("decode_mean", rows, count, grid, x, arrays)
        share = 1.0 / (arrays.count(rows) // grid.row_bytes(self.bits))
        mean = arrays.sum_rows(arrays.shaped(self._decoded(rows, grid, arrays, share), (-1, grid.chunk)))
        return arrays.cast(arrays.head(mean, count), arrays.dtype(x)), self._alarm(rows, grid, arrays)

    def _strung(self, rows: A, count: int, grid: Grid, x: A, arrays: Arrays[A]) -> tuple[A, A]:
        """Return decoded rows behind one another, and whether all is finite."""
        if self._fused(x, arrays):
            return self._decoded_on_host("decode_rows", rows, count, grid, x, arrays)
        mean = arrays.head(arrays.flat(self._decoded(rows, grid, arrays)), count)
        return arrays.cast(mean, arrays.dtype(x)), self._alarm(rows, grid, arrays)

    def _decoded_on_host(self, name: str, rows: A, count: int, grid: Grid, x: A, arrays: Arrays[A]) -> tuple[A, A]:
        from hvdplus import kernels

        decode = functools.partial(
            getattr(kernels, name),
            bits=self.bits, zero=self.zero, limit=self._top, blocks=grid.blocks, length=grid.length,
        )  # fmt: skip
        into = x if arrays.count(x) == count else None
        mean, alarm = arrays.on_host(decode, [rows], [Output((count,), "float32", into), Output((1,))])
        return mean, alarm

    @property
    def _top(self) -> int:
        """The largest level."""
        return self.limit or 1

    # -- the same by array operations -------------------------------------------------------------------------
    def quantized(self, blocks: A, real: int, site: Site[A], phase: int) -> tuple[A, A]:
        """Return the scales' bits ``(k, 1)`` and the codes, uint8 ``(k, length)``, of ``blocks`` ``(k, length)``.

        A block with a number that is not finite has a scale that is not finite. Only the first ``real`` numbers of all
        are no filling. ``phase`` is 0 for what this rank gives, 1 for averages.
        """
        raise NotImplementedError

    def _encode(self, numbers: A, real: int, grid: Grid, site: Site[A], phase: int) -> A:
        """Turn whole chunks into rows of bytes: codes, then scales."""
        arrays = site.arrays
        rows = arrays.count(numbers) // grid.chunk
        scales, codes = self.quantized(arrays.shaped(numbers, (-1, grid.length)), real, site, phase)
        parts = [arrays.packed(arrays.shaped(codes, (rows, -1)), self.bits), arrays.to_bytes(scales)]
        return arrays.joined([arrays.shaped(part, (rows, -1)) for part in parts])

    def _decoded(self, rows: A, grid: Grid, arrays: Arrays[A], share: float = 1.0) -> A:
        """Turn rows of bytes into rows of numbers times ``share``."""
        width = grid.chunk * self.bits // 8
        codes = arrays.shaped(arrays.unpacked(arrays.part(rows, 0, width), self.bits), (-1, grid.length))
        scales = arrays.scaled(self._scales_of(rows, grid, arrays), share)
        numbers = arrays.times(self._levels(codes, arrays), scales)
        return arrays.shaped(numbers, (-1, grid.chunk))

    def _scales_of(self, rows: A, grid: Grid, arrays: Arrays[A]) -> A:
        """Return the scales at the end of each row, as a column."""
        end = grid.row_bytes(self.bits)
        tail = arrays.part(rows, end - grid.blocks * _SCALE_BYTES, end)
        return _scales(arrays.from_bytes(arrays.shaped(tail, (-1, _SCALE_BYTES)), "int16"), arrays)

    def _alarm(self, rows: A, grid: Grid, arrays: Arrays[A]) -> A:
        """Return numbers that are 0 where all are finite that the rows stand for, else NaN."""
        largest = arrays.scaled(arrays.flat(self._scales_of(rows, grid, arrays)), float(self._top))
        return arrays.scaled(largest, 0.0)

    def _levels(self, codes: A, arrays: Arrays[A]) -> A:
        levels = arrays.cast(codes, "float32")
        return arrays.shifted(arrays.scaled(levels, self.step) if self.step != 1 else levels, -self.zero)


@dataclass(frozen=True)
class Whole(Quantizer):
    """Whole numbers from ``-limit`` to ``limit``, times a scale of the block's largest number over ``limit``.

    ``rounding`` is ``"nearest"`` (at most half a scale off) or ``"stochastic"`` (up or down by chance, so that the
    expected value is the number itself; Alistarh et al. 2017).
    """

    rounding: str = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ("nearest", "stochastic"):
            raise StrategyError(f"rounding={self.rounding!r} must be 'nearest' or 'stochastic'.")

    @property
    def reads_pieces(self) -> bool:  # type: ignore[override]
        """Whether there is a loop that rounds so."""
        return self.rounding == "nearest"

    def _fused(self, x: A, arrays: Arrays[A]) -> bool:
        return self.rounding == "nearest" and super()._fused(x, arrays)

    def quantized(self, blocks: A, real: int, site: Site[A], phase: int) -> tuple[A, A]:
        """Divide by the scale and round."""
        arrays = site.arrays
        if self.rounding == "nearest":  # a scale rounded down makes the largest 127.25: it is rounded to 127
            scales = arrays.to_bits(arrays.scaled(arrays.largest(blocks), 1.0 / self.limit), _SCALE)
            levels = arrays.rounded(arrays.over(blocks, _scales(scales, arrays)))
        else:  # what is 127.25 could go up to 128: the scale is a bit larger
            scales = arrays.to_bits(arrays.scaled(arrays.largest(blocks), (1.0 + 2.0**-8) / self.limit), _SCALE)
            levels = self._by_chance(arrays.over(blocks, _scales(scales, arrays)), site, phase)
        levels = arrays.limited(levels, self.limit)  # where a scale is subnormal, its rounding is coarse
        return scales, arrays.cast(arrays.shifted(levels, self.zero), "uint8")

    def _by_chance(self, levels: A, site: Site[A], phase: int) -> A:
        arrays = site.arrays
        seed = ((site.place * site.size + site.rank) * 2 + phase) % 2**32
        chance = arrays.uniform(arrays.count(levels), seed, site.step)
        return arrays.floored(arrays.add(arrays.flat(levels), chance))


@dataclass(frozen=True)
class Int8(Whole):
    """8 bits a number, in blocks of at most ``block``."""

    block: int = 512
    bits = 8
    kind = "whole"
    zero = 128
    limit = 127


@dataclass(frozen=True)
class Int4(Whole):
    """4 bits a number, in blocks of at most ``block``."""

    block: int = 256
    bits = 4
    kind = "whole"
    zero = 8
    limit = 7


@dataclass(frozen=True)
class Ternary(Quantizer):
    """2 bits a number: 0, or the sign of what is at least 0.7 times the block's mean size.

    The scale is the mean size of the numbers that are kept (the threshold and scale of ternary weight networks,
    Li et al. 2016).
    """

    block: int = 128
    bits = 2
    kind = "ternary"
    zero = 1

    def quantized(self, blocks: A, real: int, site: Site[A], phase: int) -> tuple[A, A]:
        """Keep the signs of the large ones."""
        arrays = site.arrays
        size = arrays.absolute(blocks)
        threshold = arrays.scaled(_average(size, real, arrays), 0.7)
        kept = arrays.cast(arrays.at_least(size, threshold), "float32")
        total, number = arrays.average(arrays.times(size, kept)), arrays.average(kept)
        scales = arrays.over(total, number)  # of numbers one is always kept, and a NaN times nothing stays one
        below = arrays.at_least(arrays.scaled(blocks, -1.0), threshold)
        codes = arrays.subtract(arrays.shifted(arrays.at_least(blocks, threshold), 1), below)
        return arrays.to_bits(scales, _SCALE), codes


@dataclass(frozen=True)
class OneBit(Quantizer):
    """1 bit a number: its sign, times the block's mean size, which is the nearest such vector (Seide et al. 2014)."""

    block: int = 256
    bits = 1
    kind = "onebit"
    step = 2
    zero = 1

    def quantized(self, blocks: A, real: int, site: Site[A], phase: int) -> tuple[A, A]:
        """Keep the signs."""
        arrays = site.arrays
        scales = _average(arrays.absolute(blocks), real, arrays)
        return arrays.to_bits(scales, _SCALE), arrays.at_least(blocks, arrays.zeros(1, "float32"))


_KINDS: dict[str, type[Quantizer]] = {"ternary": Ternary, "int4": Int4, "int8": Int8}  # what averages may travel in


def _scales(bits: A, arrays: Arrays[A]) -> A:
    return arrays.from_bits(bits, _SCALE, "float32")


def _average(size: A, real: int, arrays: Arrays[A]) -> A:
    """Return the mean of every block ``(k, 1)`` over those of its numbers that are no filling."""
    means = arrays.average(size)
    blocks = arrays.count(means)
    length = arrays.count(size) // blocks
    full, rest = divmod(real, length)
    if not rest:
        return means
    flat = arrays.flat(means)
    partial = arrays.scaled(arrays.part(flat, full, full + 1), length / rest)
    parts = [arrays.part(flat, 0, full), partial, arrays.part(flat, full + 1, blocks)]
    return arrays.shaped(arrays.joined(parts), (blocks, 1))
