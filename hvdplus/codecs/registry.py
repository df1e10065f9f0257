"""The codecs by name, and the grammar of a codec spec: ``name``, ``name:argument``, ``name:argument,key=value``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hvdplus.codecs.auto import Auto
from hvdplus.codecs.cast import Cast
from hvdplus.codecs.contract import Codec
from hvdplus.codecs.exact import Exact
from hvdplus.codecs.lowrank import PowerSGD
from hvdplus.codecs.quantize import Int4, Int8, OneBit, Ternary
from hvdplus.codecs.sparsify import RandomK, TopK
from hvdplus.errors import StrategyError

C = TypeVar("C", bound=Callable[..., Codec])

_MAKERS: dict[str, Callable[..., Codec]] = {
    "exact": Exact,
    "fp16": lambda: Cast("float16"),
    "bf16": lambda: Cast("bfloat16"),
    "int8": Int8,
    "int4": Int4,
    "ternary": Ternary,
    "onebit": OneBit,
    "topk": TopK,
    "randomk": RandomK,
    "powersgd": PowerSGD,
    "auto": Auto,
}


def known() -> list[str]:
    """Return the names of all codecs, in alphabetical order."""
    return sorted(_MAKERS)


def register(name: str) -> Callable[[C], C]:
    """Make a class (or function that returns a codec) known under ``name``; use it as a decorator.

    Example:
        >>> from hvdplus.codecs.contract import Outcome
        >>> from hvdplus.collectives import AllReduce
        >>> @register("half_of_it")
        ... class HalfOfIt:
        ...     def exchange(self, x, site):
        ...         mean = yield AllReduce(x * 0.5, scale=1 / site.size)
        ...         return Outcome(mean, sent=x * 0.5)
        >>> "half_of_it" in known()
        True
        >>> del _MAKERS["half_of_it"]

    Raises:
        StrategyError: the name is taken or cannot stand in a spec.
    """
    if not name.isidentifier():
        raise StrategyError(f"codec name {name!r} is not an identifier; use letters, digits and underscores.")
    if name in _MAKERS:
        raise StrategyError(f"codec name {name!r} is taken; choose another than {', '.join(known())}.")

    def enter(maker: C) -> C:
        _MAKERS[name] = maker
        return maker

    return enter


def make(spec: str) -> Codec:
    """Build the codec that ``spec`` names.

    Raises:
        StrategyError: the name is unknown, or the codec refuses its arguments.
    """
    name, arguments, options = split(spec)
    if name not in _MAKERS:
        near = difflib.get_close_matches(name, known(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise StrategyError(f"codec {name!r} is unknown; known are {', '.join(known())}{hint}")
    maker = _MAKERS[name]
    try:
        return maker(*arguments, **options)
    except TypeError as error:
        misfit = _misfit(maker, arguments, options) or error
        takes = _takes(name, maker)
        raise StrategyError(f"codec spec {spec!r} does not fit codec {name!r}: {misfit}; {takes}.") from error


def _misfit(maker: Callable[..., Codec], arguments: Sequence[Any], options: Mapping[str, Any]) -> TypeError | None:
    """Return why a codec does not take these, if it does not, without the names of Python's functions."""
    try:
        inspect.signature(maker).bind(*arguments, **options)
    except TypeError as error:
        return error
    return None


def _takes(name: str, maker: Callable[..., Codec]) -> str:
    """Say what a codec takes, in its order."""
    texts = []
    for parameter in inspect.signature(maker).parameters.values():
        needed = parameter.default is parameter.empty
        texts.append(parameter.name if needed else f"{parameter.name}={parameter.default!r}")
    return f"{name} takes {', '.join(texts) or 'nothing'}"


def serves(spec: str, shape: tuple[int, ...]) -> bool:
    """Whether the codec that ``spec`` names can take an array of this shape."""
    codec = make(spec)
    return bool(codec.serves(shape)) if hasattr(codec, "serves") else True


def limit(spec: str, shape: tuple[int, ...]) -> str:
    """Return what the codec says of the arguments it would need for an array of this shape, ready to be appended."""
    codec = make(spec)
    return f": {codec.limit(shape)}" if hasattr(codec, "limit") else ""


def is_ours(spec: str) -> bool:
    """Whether the codec that ``spec`` names is one of this package's, which ask for the same on all ranks."""
    return type(make(spec)).__module__.startswith(__package__ + ".")


def split(spec: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Take a spec apart into its name, positional arguments and options."""
    name, _, rest = spec.strip().partition(":")
    arguments: list[Any] = []
    options: dict[str, Any] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if equals:
            options[key.strip()] = _value(value)
        else:
            arguments.append(_value(part))
    return name.strip(), arguments, options


def _value(text: str) -> Any:
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
