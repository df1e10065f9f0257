"""The codec that is chosen by measurement when an optimizer is wrapped; it never travels itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from hvdplus.codecs.contract import Exchange, Site
from hvdplus.errors import StrategyError

A = TypeVar("A")

# From the one that loses nothing to the one that loses most; those that need tuning of their own are not among them.
LADDER = ("exact", "fp16", "int8", "int4", "ternary", "onebit")


@dataclass(frozen=True)
class Auto:
    """Whichever of exact, fp16, int8, int4, ternary and onebit is fastest here, but none that loses more than ``upto``.

    Example:
        >>> Auto().candidates, Auto("fp16").candidates
        (('exact', 'fp16', 'int8', 'int4'), ('exact', 'fp16'))
    """

    upto: str = "int4"

    def __post_init__(self) -> None:
        if self.upto not in LADDER:
            raise StrategyError(f"upto={self.upto!r} must be one of {', '.join(LADDER)}: the most that may be lost.")

    @property
    def candidates(self) -> tuple[str, ...]:
        """The specs it may choose among."""
        return LADDER[: LADDER.index(self.upto) + 1]

    def exchange(self, x: A, site: Site[A]) -> Exchange[A]:
        """Refuse: it stands for a codec that is not known yet.

        Raises:
            StrategyError: always.
        """
        raise StrategyError(
            f"codec 'auto' at {site.name} was not chosen; it can be the codec of a whole strategy, chosen when an "
            f"optimizer is wrapped, and no override."
        )
