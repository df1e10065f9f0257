"""The quantising codecs: 8, 4, 2 or 1 bit a number and a scale a block, averaged in fp32 by the two-phase exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hvdplus.arrays import Arrays
from hvdplus.codecs.contract import Exchange, Outcome, Site
from hvdplus.codecs.twophase import two_phase
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

    def real(self, rank: int) -> int:
        """How many numbers of a rank's chunk are no filling."""
        return min(max(self.count - rank * self.chunk, 0), self.chunk)


@dataclass(frozen=True)
class Quantizer:
    """What the codecs here share. ``bits`` to a number; a code is ``(level + zero) / step``.

    Every rank sends to every other one that rank's chunk, codes and scales in one message; each decodes what it got,
    averages in fp32, adds what it lost there before (its *server* residual) and sends the average encoded to all.
    """

    block: int
    bits: ClassVar[int]
    step: ClassVar[int] = 1
    zero: ClassVar[int]
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        unit = 8 // self.bits
        if not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1 or self.block % unit:
            multiple = f" and a multiple of {unit}, the numbers in a byte" if unit > 1 else ""
            raise StrategyError(f"block={self.block!r} must be a whole number of at least {unit}{multiple}.")

    def exchange(self, x: A, site: Site[A]) -> Exchange[A]:
        """Average ``x`` over the ranks."""
        arrays, count = site.arrays, site.arrays.count(x)
        full = arrays.dtype(x)
        grid = Grid.of(count, site.size, self.block, 8 // self.bits)
        wire = self._encode(arrays.padded(arrays.cast(x, "float32"), grid.ranks * grid.chunk), count, grid, site, 0)
        real = grid.real(site.rank)
        outcome = yield from two_phase(
            wire,
            lambda average: arrays.flat(self._encode(average, real, grid, site, 1)),
            lambda rows: self._decode(rows, grid, arrays),
            site,
            residual=site.cell("server", grid.chunk) if site.feedback else None,
            real=real,
        )
        mean = arrays.cast(arrays.head(outcome.mean, count), full)
        if not site.keep_sent:
            return Outcome(mean)
        sent = arrays.head(arrays.flat(self._decode(wire, grid, arrays)), count)
        return Outcome(mean, arrays.cast(sent, full))

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
        parts = [arrays.packed(codes, self.bits), arrays.to_bytes(scales)]
        return arrays.joined([arrays.shaped(part, (rows, -1)) for part in parts])

    def _decode(self, rows: A, grid: Grid, arrays: Arrays[A]) -> A:
        """Turn rows of bytes into rows of numbers."""
        width = grid.chunk * self.bits // 8
        codes = arrays.shaped(arrays.part(rows, 0, width), (-1, grid.length * self.bits // 8))
        tail = arrays.part(rows, width, width + grid.blocks * _SCALE_BYTES)
        scales = _scales(arrays.from_bytes(arrays.shaped(tail, (-1, _SCALE_BYTES)), "int16"), arrays)
        numbers = arrays.times(self._levels(arrays.unpacked(codes, self.bits), arrays), scales)
        return arrays.shaped(numbers, (-1, grid.chunk))

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
    limit: ClassVar[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ("nearest", "stochastic"):
            raise StrategyError(f"rounding={self.rounding!r} must be 'nearest' or 'stochastic'.")

    def quantized(self, blocks: A, real: int, site: Site[A], phase: int) -> tuple[A, A]:
        """Divide by the scale and round."""
        arrays = site.arrays
        if self.rounding == "nearest":  # a scale rounded down makes the largest 127.25: it is rounded to 127
            scales = arrays.to_bits(arrays.scaled(arrays.largest(blocks), 1.0 / self.limit), _SCALE)
            levels = arrays.rounded(arrays.over(blocks, _scales(scales, arrays)))
        else:  # what is 127.25 could go up to 128: the scale is a bit larger
            scales = arrays.to_bits(arrays.scaled(arrays.largest(blocks), (1.0 + 2.0**-8) / self.limit), _SCALE)
            levels = self._by_chance(arrays.over(blocks, _scales(scales, arrays)), site, phase)
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
    zero = 128
    limit = 127


@dataclass(frozen=True)
class Int4(Whole):
    """4 bits a number, in blocks of at most ``block``."""

    block: int = 128
    bits = 4
    zero = 8
    limit = 7


@dataclass(frozen=True)
class Ternary(Quantizer):
    """2 bits a number: 0, or the sign of what is at least 0.7 times the block's mean size.

    The scale is the mean size of the numbers that are kept (the threshold and scale of ternary weight networks,
    Li et al. 2016).
    """

    block: int = 64
    bits = 2
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

    block: int = 64
    bits = 1
    step = 2
    zero = 1

    def quantized(self, blocks: A, real: int, site: Site[A], phase: int) -> tuple[A, A]:
        """Keep the signs."""
        arrays = site.arrays
        scales = _average(arrays.absolute(blocks), real, arrays)
        return arrays.to_bits(scales, _SCALE), arrays.at_least(blocks, arrays.zeros(1, "float32"))


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
