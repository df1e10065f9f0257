"""What codecs keep from step to step, by parameter: taken out of a plan's cells, put into another's, shared over ranks.

Cells belong to buckets, and buckets to one plan on one number of ranks. A parameter outlives both, so what is kept for
it is found by its name when a part of the model is frozen, the buckets are cut anew, or a checkpoint is resumed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from hvdplus.arrays import Arrays
from hvdplus.codecs.lowrank import matrix_of
from hvdplus.plan import Bucket, Plan

A = TypeVar("A")

RESIDUAL = "residual"  # what this rank has not sent yet: one number for each of the bucket's
SERVER = "server"  # what encoding this rank's share of the averages has lost: a chunk of the bucket, added to the mean
_START = "start"  # PowerSGD's vectors, matrix after matrix; the same on all ranks

#: Cells in the unit of the gradients: they change with a loss scale.
IN_GRADIENTS = (RESIDUAL, SERVER)

_AND = " + "  # between the names of a bucket whose cell cannot be cut
_NAMED = 5  # names in one line of the log


@dataclass(frozen=True)
class Piece(Generic[A]):
    """Consecutive numbers that are kept for a parameter; the first belongs to its number ``begin``.

    Numbers are counted as they lie in memory; those of ``"start"`` count from 0.
    """

    begin: int
    values: A


#: What is kept, by the name of the cell and then by that of the parameter.
Kept: TypeAlias = dict[str, dict[str, Piece[A]]]


@dataclass(frozen=True)
class _Place:
    """Where a cell has a parameter's numbers: ``count`` of them from ``at``, which are its own from ``begin`` on."""

    name: str
    at: int
    count: int
    begin: int


@dataclass(frozen=True)
class Saved(Generic[A]):
    """What a checkpoint holds: what codecs kept on some or all of ``size`` ranks."""

    size: int
    ranks: Mapping[int, Kept[A]]

    @property
    def complete(self) -> bool:
        """Whether it holds all ranks."""
        return set(self.ranks) == set(range(self.size))


@dataclass(frozen=True)
class Put(Generic[A]):
    """What comes of putting ``Kept`` into the cells of a plan.

    ``cells`` are their new values, bucket by bucket; ``waiting`` belongs to parameters that the plan has not (they may
    be frozen); ``misfits`` names what has no place although its parameter is there.
    """

    cells: list[dict[str, A]]
    waiting: Kept[A]
    misfits: list[str]


def take(plan: Plan, cells: Sequence[Mapping[str, A]], arrays: Arrays[A], rank: int) -> Kept[A]:
    """Return a copy of what the cells hold, by parameter.

    Args:
        plan: whose buckets the cells belong to.
        cells: the cells' values of each bucket, by their names.
        arrays: the operations on them.
        rank: whose cells they are.

    Example:
        >>> import numpy as np
        >>> from hvdplus.arrays import NumPyArrays
        >>> from hvdplus.plan import Parameter, plan
        >>> from hvdplus.strategy import Strategy
        >>> model = plan(
        ...     [Parameter("a", (2,), "float32"), Parameter("b", (3,), "float32")], Strategy("int8", min_compress=0)
        ... )
        >>> kept = take(model, [{"residual": np.arange(5.0)}, {}], NumPyArrays(), rank=0)
        >>> kept["residual"]["a"].values.tolist(), kept["residual"]["b"].values.tolist()
        ([3.0, 4.0], [0.0, 1.0, 2.0])
    """
    kept: Kept[A] = {}
    for bucket, named in zip(plan.buckets, cells, strict=True):
        for key, value in named.items():
            for place in _places(bucket, key, arrays.count(value), rank):
                part = arrays.copy(arrays.part(value, place.at, place.at + place.count))
                kept.setdefault(key, {})[place.name] = Piece(place.begin, part)
    return kept


def put(plan: Plan, cells: Sequence[Mapping[str, A]], kept: Kept[A], arrays: Arrays[A], rank: int, size: int) -> Put[A]:
    """Find new values for the cells of a plan: what is kept for its parameters, and zeros where nothing is.

    What a rank kept as a server goes into its residual where another rank serves those numbers now; it counts for
    ``size`` ranks there, since it was added to the mean.

    Args:
        plan: whose buckets the cells belong to.
        cells: the cells' present values; their sizes and dtypes count.
        kept: what to put into them.
        arrays: the operations on both.
        rank: whose cells they are.
        size: the number of ranks.
    """
    places = [
        {key: _places(bucket, key, arrays.count(value), rank) for key, value in named.items()}
        for bucket, named in zip(plan.buckets, cells, strict=True)
    ]
    kept = _served(plan, places, kept, arrays, size)
    used: set[tuple[str, str]] = set()

    def filled(value: A, key: str, where: Sequence[_Place]) -> A:
        parts = [arrays.zeros(0, arrays.dtype(value))]
        for place in where:
            piece = kept.get(key, {}).get(place.name)
            if piece is not None and _fits(piece, place, arrays):
                used.add((key, place.name))
                parts.append(arrays.cast(piece.values, arrays.dtype(value)))
            else:
                parts.append(arrays.zeros(place.count, arrays.dtype(value)))
        return arrays.padded(arrays.joined(parts), arrays.count(value))

    values = [
        {key: filled(value, key, where[key]) for key, value in named.items()}
        for named, where in zip(cells, places, strict=True)
    ]
    return Put(values, *_unused(plan, kept, used))


def share(saved: Saved[A], rank: int, size: int, counts: Mapping[str, int], arrays: Arrays[A]) -> tuple[Kept[A], str]:
    """Return what this rank goes on with, and a line that is to be logged here, if any.

    On as many ranks as before, each gets its own back. On another number, the sum over ranks of what they have not
    delivered is kept, an equal share of it on each rank. Where a checkpoint does not hold all ranks that sum is not
    known, and a rank whose own is missing starts with zeros. What is no residual is the same on all ranks.

    Args:
        saved: what the checkpoint holds.
        rank: this rank.
        size: the number of ranks now.
        counts: how many numbers each parameter has.
        arrays: the operations on them.
    """
    if not any(pieces for kept in saved.ranks.values() for pieces in kept.values()):
        return {}, ""
    if size == 1 < saved.size:
        return {}, f"hvdplus: what {saved.size} ranks had not delivered is dropped: one rank exchanges nothing."
    own = saved.ranks.get(rank)
    common = saved.ranks[min(saved.ranks)] if own is None else own
    rest = {key: pieces for key, pieces in common.items() if key not in IN_GRADIENTS}
    if saved.complete and size != saved.size:
        total = owed([saved.ranks[r] for r in range(saved.size)], saved.size, counts, arrays)
        equal = {name: Piece(0, arrays.scaled(piece.values, 1.0 / size)) for name, piece in total.items()}
        return {**rest, RESIDUAL: equal}, _resized(saved.size, size) if rank == 0 else ""
    missing = [r for r in range(size) if r not in saved.ranks]
    speaks = missing[:1] if size == saved.size else [0]  # who has its own back misses nothing
    line = _partial(saved) if len(saved.ranks) < saved.size and speaks == [rank] else ""
    if own is None or size == saved.size:
        return own or rest, line
    return {**rest, RESIDUAL: owed([own], saved.size, counts, arrays)}, line


def owed(ranks: Iterable[Kept[A]], size: int, counts: Mapping[str, int], arrays: Arrays[A]) -> dict[str, Piece[A]]:
    """Return the sum over ranks of what they have not delivered, by parameter.

    What a rank lost as a server was to be added to the mean of ``size`` ranks, so it counts ``size`` times.

    Args:
        ranks: what each kept.
        size: the number of ranks among which it was exchanged.
        counts: how many numbers each parameter has; what does not fit them is left out.
        arrays: the operations on them.
    """
    total: dict[str, Piece[A]] = {}
    for kept in ranks:
        for key, factor in ((RESIDUAL, 1), (SERVER, size)):
            for name, piece in kept.get(key, {}).items():
                if _inside(piece, counts.get(name, 0), arrays):
                    whole = _whole(piece, counts[name], arrays)
                    total[name] = _plus(total.get(name), arrays.scaled(whole, factor), arrays)
    return total


def rescaled(kept: Kept[A], factor: float, arrays: Arrays[A]) -> Kept[A]:
    """Return ``kept`` with everything that is in the unit of the gradients multiplied by ``factor``."""
    if factor == 1.0:
        return kept
    return {
        key: {n: Piece(p.begin, arrays.scaled(p.values, factor)) for n, p in pieces.items()}
        if key in IN_GRADIENTS
        else pieces
        for key, pieces in kept.items()
    }


def joined(first: Kept[A], second: Kept[A]) -> Kept[A]:
    """Return all of both; the second's where both have something."""
    keys = [*first, *(key for key in second if key not in first)]
    return {key: {**first.get(key, {}), **second.get(key, {})} for key in keys}


def in_gradients(label: str) -> bool:
    """Whether a cell, by the label that its site has given it, is in the unit of the gradients.

    Example:
        >>> in_gradients("bucket 0 (bias ... weight) residual"), in_gradients("bucket 1 (weight) start")
        (True, False)
    """
    return label.rpartition(" ")[2] in IN_GRADIENTS


def norm(kept: Kept[A], arrays: Arrays[A]) -> float:
    """Return the Euclidean norm of the residual.

    Example:
        >>> import numpy as np
        >>> from hvdplus.arrays import NumPyArrays
        >>> norm({"residual": {"a": Piece(0, np.array([3.0])), "b": Piece(0, np.array([4.0]))}}, NumPyArrays())
        5.0
    """
    return math.hypot(*(arrays.norm(piece.values) for piece in kept.get(RESIDUAL, {}).values()))


def parameters_of(name: str) -> list[str]:
    """Return the parameters that something is kept for: one, or all of a bucket whose cell cannot be cut."""
    return name.split(_AND)


def whole_name(parameters: Sequence[str]) -> str:
    """Return the name under which something is kept for all of these parameters; undoes ``parameters_of``."""
    return _AND.join(parameters)


def misfit_line(misfits: Sequence[str]) -> str:
    """Say that something is dropped, and what.

    Example:
        >>> misfit_line(["0.weight (residual)"])
        'hvdplus: dropped what codecs kept of 0.weight (residual): its shape or codec is another one now.'
    """
    names = ", ".join(misfits[:_NAMED]) + (f" and {len(misfits) - _NAMED} more" if len(misfits) > _NAMED else "")
    return f"hvdplus: dropped what codecs kept of {names}: its shape or codec is another one now."


# -- where things are -----------------------------------------------------------------------------------------


def _places(bucket: Bucket, key: str, size: int, rank: int) -> list[_Place]:
    """Say which parameters' numbers a cell of ``size`` has; they follow one another without a gap."""
    if key == SERVER:
        return _chunk(bucket, rank * size, size)
    if size == bucket.count:
        return [_Place(m.name, m.offset, m.count, 0) for m in bucket.members]
    columns = [matrix_of(member.shape)[1] for member in bucket.members]
    vectors, left = divmod(size, sum(columns))
    if key != _START or left:
        return [_Place(whole_name([member.name for member in bucket.members]), 0, size, 0)]
    lengths = [vectors * width for width in columns]
    begins = itertools.accumulate(lengths, initial=0)
    return [_Place(m.name, at, n, 0) for m, n, at in zip(bucket.members, lengths, begins, strict=False)]


def _chunk(bucket: Bucket, begin: int, size: int) -> list[_Place]:
    """Say which parameters' numbers lie in ``size`` numbers of a bucket from ``begin`` on."""
    places = []
    for m in bucket.members:
        first, last = max(m.offset, begin), min(m.offset + m.count, begin + size)
        if first < last:
            places.append(_Place(m.name, first - begin, last - first, first - m.offset))
    return places


def _served(
    plan: Plan, places: Sequence[Mapping[str, Sequence[_Place]]], kept: Kept[A], arrays: Arrays[A], size: int
) -> Kept[A]:
    """Return ``kept`` with the servers' part as the cells have it, and the rest of it in the residual."""
    counts = {member.name: member.count for bucket in plan.buckets for member in bucket.members}
    served = {place.name: place for named in places for place in named.get(SERVER, ())}
    residual, server = dict(kept.get(RESIDUAL, {})), dict(kept.get(SERVER, {}))
    for name, piece in kept.get(SERVER, {}).items():
        place = served.get(name)
        if name not in counts or _fits(piece, place, arrays) or not _inside(piece, counts[name], arrays):
            continue
        whole = _whole(piece, counts[name], arrays)
        del server[name]
        if place is not None:
            begin, end = place.begin, place.begin + place.count
            server[name] = Piece(begin, arrays.part(whole, begin, end))
            parts = [arrays.part(whole, 0, begin), arrays.zeros(place.count, arrays.dtype(whole))]
            whole = arrays.joined([*parts, arrays.part(whole, end, counts[name])])
        residual[name] = _plus(residual.get(name), arrays.scaled(whole, size), arrays)
    return {**kept, RESIDUAL: residual, SERVER: server}


def _fits(piece: Piece[A], place: _Place | None, arrays: Arrays[A]) -> bool:
    if place is None:
        return False
    return (piece.begin, arrays.count(piece.values)) == (place.begin, place.count)


def _inside(piece: Piece[A], count: int, arrays: Arrays[A]) -> bool:
    return piece.begin + arrays.count(piece.values) <= count


def _whole(piece: Piece[A], count: int, arrays: Arrays[A]) -> A:
    """Return all ``count`` numbers of a parameter, zeros around the piece, in fp32 or wider."""
    dtype = arrays.dtype(piece.values)
    values = arrays.cast(piece.values, dtype if dtype == "float64" else "float32")
    return arrays.padded(arrays.joined([arrays.zeros(piece.begin, arrays.dtype(values)), values]), count)


def _plus(piece: Piece[A] | None, values: A, arrays: Arrays[A]) -> Piece[A]:
    """Add to a whole parameter's numbers; one of another length is left as it is, to be found not to fit."""
    if piece is None:
        return Piece(0, values)
    if arrays.count(piece.values) != arrays.count(values):
        return piece
    return Piece(0, arrays.add(piece.values, arrays.cast(values, arrays.dtype(piece.values))))


def _unused(plan: Plan, kept: Kept[A], used: set[tuple[str, str]]) -> tuple[Kept[A], list[str]]:
    """Tell what belongs to parameters that are not in the plan from what does not fit."""
    present = {member.name for bucket in plan.buckets for member in bucket.members}
    waiting: Kept[A] = {}
    misfits = []
    for key, pieces in kept.items():
        for name, piece in pieces.items():
            if (key, name) in used:
                continue
            if all(part in present for part in parameters_of(name)):
                misfits.append(f"{name} ({key})")
            else:
                waiting.setdefault(key, {})[name] = piece
    return waiting, misfits


def _resized(before: int, now: int) -> str:
    return (
        f"hvdplus: what {before} ranks had not delivered is loaded on {now}: its sum is kept, an equal share on each."
    )


def _partial(saved: Saved[A]) -> str:
    have = ", ".join(map(str, sorted(saved.ranks)))
    return (
        f"hvdplus: what was loaded holds the residuals of rank {have} of {saved.size} only, and what others had not "
        f"delivered is lost; let all ranks call optimizer.hvdplus.consolidate() before one of them saves for all."
    )
