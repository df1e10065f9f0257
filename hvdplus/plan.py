"""Decides, without any rank, what travels together and in which codec: parameters and a strategy give buckets."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from hvdplus import codecs
from hvdplus.errors import StrategyError
from hvdplus.strategy import Strategy

_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}
# A complex number travels as two real ones.
_REAL = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class Parameter:
    """One named array that is exchanged. ``place`` (a device) and ``layout`` (strides) must be equal on all ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    place: str = ""
    layout: tuple[int, ...] = ()

    def __str__(self) -> str:
        layout = f" with strides {self.layout}" if self.layout else ""
        return f"{self.name} {self.shape} {self.dtype} on {self.place or 'cpu'}{layout}"

    @property
    def count(self) -> int:
        """Number of real numbers."""
        return prod(self.shape) * (2 if self.dtype in _REAL else 1)

    @property
    def real_dtype(self) -> str:
        """The dtype of those numbers."""
        return _REAL.get(self.dtype, self.dtype)

    @property
    def in_memory(self) -> tuple[int, ...]:
        """The lengths of the dimensions in the order in which they lie in memory; complex numbers are pairs."""
        lengths = self.shape
        if len(self.layout) == len(self.shape):
            order = sorted(range(len(lengths)), key=lambda i: -self.layout[i])
            lengths = tuple(lengths[i] for i in order)
        return (*lengths, 2) if self.dtype in _REAL else lengths


@dataclass(frozen=True)
class Member:
    """A parameter's place in its bucket: ``index`` in the parameters given, ``offset`` in numbers.

    ``shape`` is that of its numbers as they lie in memory.
    """

    index: int
    name: str
    offset: int
    count: int
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bucket:
    """One contiguous buffer: ``count`` numbers of ``dtype`` in ``place`` that travel in one codec.

    Behind the members come ``flags`` more numbers, one for each parameter of the plan (in the last bucket only):
    1 where this rank used the parameter. Their mean is 0 where no rank did. Notes, if asked for, come after them.
    """

    index: int
    codec: str
    dtype: str
    place: str
    members: tuple[Member, ...]
    flags: int = 0

    @property
    def count(self) -> int:
        """Number of numbers, flags included."""
        return self.flags_offset + self.flags

    @property
    def flags_offset(self) -> int:
        """Where the flags begin."""
        return sum(member.count for member in self.members)

    @property
    def label(self) -> str:
        """What a message calls it."""
        if not self.members:
            return f"bucket {self.index} (usage flags)"
        names = [self.members[0].name] + ([self.members[-1].name] if len(self.members) > 1 else [])
        return f"bucket {self.index} ({' ... '.join(names)})"


@dataclass(frozen=True)
class Plan:
    """Buckets in the order in which they are exchanged, for ``parameters`` in the order given."""

    parameters: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...]


def plan(parameters: Sequence[Parameter], strategy: Strategy, notes: int = 0) -> Plan:
    """Cut parameters into buckets.

    Backward fills gradients from the last layer to the first, so parameters are taken in reverse and a bucket is
    closed when it has ``strategy.bucket_bytes``; buckets are ordered by their last member. Empty parameters have
    nothing to exchange and stay out.

    Args:
        parameters: in the order of registration.
        strategy: gives codec, overrides, ``min_compress`` and ``bucket_bytes``.
        notes: how many more numbers the caller wants to travel behind the usage flags.

    Raises:
        StrategyError: the strategy's codec can take none of them.
    """
    _check_use(parameters, strategy)
    open_buckets: dict[tuple[str, str, str], list[int]] = {}
    closed: list[tuple[tuple[str, str, str], list[int]]] = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        if parameter.count == 0:
            continue
        key = (codec_of(parameter, strategy), parameter.real_dtype, parameter.place)
        members = open_buckets.setdefault(key, [])
        members.append(index)
        if sum(_nbytes(parameters[i]) for i in members) >= strategy.bucket_bytes:
            closed.append((key, open_buckets.pop(key)))
    closed += open_buckets.items()
    closed.sort(key=lambda entry: -entry[1][-1])
    buckets = [_bucket(i, *entry, parameters) for i, entry in enumerate(closed)]
    return Plan(tuple(parameters), _with_flags(buckets, len(parameters) + notes))


def codec_of(parameter: Parameter, strategy: Strategy) -> str:
    """Return the spec of the codec in which ``parameter`` travels: exact where the one wanted cannot take its shape."""
    spec = strategy.codec if parameter.count >= strategy.min_compress else "exact"
    for glob, other in strategy.overrides.items():
        if fnmatch.fnmatchcase(parameter.name, glob):
            spec = other
            break
    return spec if codecs.serves(spec, parameter.in_memory) else "exact"


def _check_use(parameters: Sequence[Parameter], strategy: Strategy) -> None:
    """Refuse a codec that is of no use: of those parameters it is meant for, it can take none."""
    meant = [
        parameter
        for parameter in parameters
        if parameter.count >= max(strategy.min_compress, 1)
        and not any(fnmatch.fnmatchcase(parameter.name, glob) for glob in strategy.overrides)
    ]
    if meant and not any(codecs.serves(strategy.codec, parameter.in_memory) for parameter in meant):
        largest = max(meant, key=lambda parameter: parameter.count)
        raise StrategyError(
            f"codec {strategy.codec!r} can take none of these parameters, not even the largest, {largest.name!r} of "
            f"shape {largest.shape}{codecs.limit(strategy.codec, largest.in_memory)}; choose another codec."
        )


def _nbytes(parameter: Parameter) -> int:
    return prod(parameter.shape) * _ITEM_BYTES[parameter.dtype]


def _bucket(index: int, key: tuple[str, str, str], indices: list[int], parameters: Sequence[Parameter]) -> Bucket:
    members, offset = [], 0
    for i in indices:
        members.append(Member(i, parameters[i].name, offset, parameters[i].count, parameters[i].in_memory))
        offset += parameters[i].count
    return Bucket(index, *key, tuple(members))


def _with_flags(buckets: list[Bucket], count: int) -> tuple[Bucket, ...]:
    """Let the usage flags ride in the last bucket where it is exact; else give them a small one of their own."""
    if not buckets:
        return ()
    last = buckets[-1]
    if last.codec == "exact":
        return (*buckets[:-1], replace(last, flags=count))
    return (*buckets, Bucket(len(buckets), "exact", "float32", last.place, (), count))
