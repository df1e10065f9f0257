"""The strategy: what is exchanged, how often and in which codec; and its one-line grammar."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hvdplus import codecs
from hvdplus.codecs.registry import split
from hvdplus.errors import StrategyError


@dataclass(frozen=True)
class Strategy:
    """How ranks train together. Validated when made, immutable, the same in every framework.

    Args:
        codec: a codec spec, such as ``"exact"``, ``"fp16"`` or ``"name:argument,key=value"``; ``"auto"`` measures when
            an optimizer is wrapped, and takes the fastest down to int4 (``"auto:onebit"``: down to onebit).
        feedback: add what the codec lost to the next step; ``None`` is the codec's own default.
        accumulate: micro-batches to a window; a window is one exchange and one update.
        op: ``"mean"`` or ``"sum"`` over ranks and micro-batches.
        warmup_steps: number of first exchanges that travel exact.
        min_compress: a parameter with fewer elements than this travels exact.
        bucket_bytes: a bucket is closed when it has reached this many bytes.
        overrides: parameter-name glob to codec spec; the first match in order decides.

    Raises:
        StrategyError: a field has a value that is not allowed; the message names field, value and what is.

    Example:
        >>> Strategy.parse("fp16,accumulate=4").accumulate
        4
    """

    codec: str = "exact"
    feedback: bool | None = None
    accumulate: int = 1
    op: str = "mean"
    warmup_steps: int = 0
    min_compress: int = 1024
    bucket_bytes: int = 25 * 2**20
    overrides: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_choice("feedback", self.feedback, (None, True, False))
        _check_choice("op", self.op, ("mean", "sum"))
        for name, least in (("accumulate", 1), ("warmup_steps", 0), ("min_compress", 0), ("bucket_bytes", 1024)):
            _check_number(name, getattr(self, name), least)
        _check_spec("codec", self.codec)
        if not isinstance(self.overrides, Mapping):
            raise StrategyError(f"overrides={self.overrides!r} must map parameter-name globs to codec specs.")
        for glob, spec in self.overrides.items():
            _check_spec(f"overrides[{glob!r}]", spec)
            if isinstance(codecs.make(spec), codecs.Auto):
                raise StrategyError(
                    f"overrides[{glob!r}]={spec!r}: auto chooses for a whole strategy; name a codec, or make it codec=."
                )
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Strategy.from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values that JSON can hold."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return values | {"overrides": dict(self.overrides)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Strategy:
        """Make a strategy of what ``to_dict`` gave; missing fields take their defaults.

        Raises:
            StrategyError: a key is no field, or a value is not allowed.
        """
        _check_fields(values)
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read ``"codec,field=value,..."``; ``overrides=GLOB=SPEC;GLOB=SPEC`` gives the overrides.

        A ``key=value`` that is no field of the strategy belongs to the codec. ``codec=...`` is allowed too.

        Raises:
            StrategyError: the text does not follow the grammar, or a value is not allowed.
        """
        if not isinstance(text, str):
            raise StrategyError(f"strategy={text!r} must be a Strategy or a text such as 'fp16,accumulate=4'.")
        spec: list[str] = []
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = part.partition("=")
            if equals and key.strip() in _FIELDS:
                values[key.strip()] = _read(key.strip(), value.strip())
            else:
                spec.append(part)
        if spec:
            values["codec"] = _join(spec, values.get("codec"))
        return cls(**values)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Strategy:
        """Read ``HVDPLUS_STRATEGY``; the default strategy where it is not set."""
        return cls.parse(environ.get("HVDPLUS_STRATEGY", ""))

    @classmethod
    def of(cls, strategy: Strategy | str | Mapping[str, Any] | None, **fields: Any) -> Strategy:
        """Turn whatever a user may pass as ``strategy`` into one, with ``fields`` on top.

        ``None`` is ``HVDPLUS_STRATEGY`` or the default.
        """
        if strategy is None:
            base = cls.from_env()
        elif isinstance(strategy, Mapping):
            base = cls.from_dict(strategy)
        else:
            base = strategy if isinstance(strategy, Strategy) else cls.parse(strategy)
        _check_fields(fields)
        return dataclasses.replace(base, **fields) if fields else base


_FIELDS = {f.name: f for f in dataclasses.fields(Strategy)}


def _check_fields(values: Mapping[str, Any]) -> None:
    for name in values:
        if name not in _FIELDS:
            raise StrategyError(f"{name!r} is no field of a strategy; the fields are {', '.join(_FIELDS)}.")


def _check_number(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise StrategyError(f"{name}={value!r} must be a whole number of at least {least}.")


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        raise StrategyError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}.")


def _check_spec(name: str, spec: Any) -> None:
    if not isinstance(spec, str):
        raise StrategyError(f"{name}={spec!r} must be a codec spec: a text such as {', '.join(codecs.known())}.")
    try:
        codecs.make(spec)
    except StrategyError as error:
        if name != "codec":
            raise StrategyError(f"{name}: {error}") from error
        if isinstance(error.__cause__, TypeError) and split(spec)[2]:  # an option may have been meant as a field
            fields = ", ".join(_FIELDS)
            raise StrategyError(f"{str(error).rstrip('.')}, and the fields of a strategy are {fields}.") from error
        raise


def _join(spec: list[str], given: str | None) -> str:
    """Put a codec spec back together of the parts that commas had separated."""
    head = [] if given is None else [given]
    if len(head + spec) > 1 and "=" not in (head + spec)[1]:
        raise StrategyError(
            f"strategy {','.join(head + spec)!r} names more than one codec; write 'codec,field=value,...' with the "
            f"fields {', '.join(_FIELDS)}."
        )
    first, *options = head + spec
    return ("," if ":" in first else ":").join([first, ",".join(options)]) if options else first


def _read(name: str, text: str) -> Any:
    if name in ("codec", "op"):
        return text
    if name == "overrides":
        pairs = (entry.partition("=") for entry in text.split(";") if entry)
        return {glob.strip(): spec.strip() for glob, _, spec in pairs}
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return int(text)
    except ValueError:
        return text  # the field's own check names it
