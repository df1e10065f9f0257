"""A finding: how one thing stands, what to do about it, and where that is explained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hvdplus.doctor.machine import Machine

Status: TypeAlias = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Verdict:
    """What a check says; a ``fix`` belongs to everything that is not ``ok``."""

    status: Status
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Finding:
    """A verdict under the name of its check; ``link`` is a section of the README."""

    check: str
    status: Status
    what: str
    fix: str
    link: str


@dataclass(frozen=True)
class Check:
    """A look at one thing; ``None`` where there is nothing to say about it on this machine."""

    name: str
    anchor: str
    look: Callable[[Machine], Verdict | None]

    @property
    def link(self) -> str:
        """The README's section on this check."""
        return f"README.md#{self.anchor}"


def ok(what: str) -> Verdict:
    """Say that something is right."""
    return Verdict("ok", what)


def warn(what: str, fix: str) -> Verdict:
    """Say that something works, but not as well as it could, or not everywhere."""
    return Verdict("warn", what, fix)


def bad(what: str, fix: str) -> Verdict:
    """Say that something does not work."""
    return Verdict("bad", what, fix)
