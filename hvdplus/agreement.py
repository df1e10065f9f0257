"""What all ranks must have in common, compared once and named when it differs."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence

from hvdplus.errors import ExchangeError, StrategyError
from hvdplus.plan import Plan
from hvdplus.strategy import Strategy
from hvdplus.version import __version__

#: An all-gather of one short text from every rank, in rank order.
Gather = Callable[[bytes], list[bytes]]

Items = Sequence[tuple[str, str]]


def agree(items: Items, gather: Gather, hint: str = "") -> None:
    """Compare ordered (key, value) items across ranks.

    One gather of a digest where all is well; a second one of the items themselves only where it is not.

    Args:
        items: what this rank has.
        gather: reaches all ranks; they call this function together.
        hint: a sentence to add: what to do.

    Raises:
        ExchangeError: on every rank, naming the first differing item, its values and who has them.
    """
    text = json.dumps(list(items)).encode()
    digest = hashlib.sha256(text).digest()
    if len(set(gather(digest))) == 1:
        return
    everyone = [[tuple(item) for item in json.loads(answer)] for answer in gather(text)]
    raise ExchangeError(f"the ranks disagree: {first_difference(everyone)}{'; ' + hint if hint else ''}.")


def check_every() -> int:
    """Read ``HVDPLUS_CHECK_EVERY``: the updates between two comparisons of all parameters, 0 for never.

    Raises:
        StrategyError: the value is no such number.
    """
    text = os.environ.get("HVDPLUS_CHECK_EVERY", "0")
    if not text.isdecimal():
        raise StrategyError(f"HVDPLUS_CHECK_EVERY={text!r} must be a number of updates, 0 for never.")
    return int(text)


def describe(plan: Plan, strategy: Strategy, owner: str, sums: bool, asks: Sequence[str] = ()) -> list[tuple[str, str]]:
    """List what an optimizer's ranks must have in common, what differs most often first.

    Args:
        plan: its parameters, in order.
        strategy: how they are exchanged.
        owner: what the optimizer is.
        sums: whether micro-batches are added up rather than averaged.
        asks: what codecs ask for, from the first bucket to the last.
    """
    return [
        ("hvdplus", __version__),
        ("optimizer", owner),
        *((key, json.dumps(value)) for key, value in strategy.to_dict().items()),
        ("micro-batches", "summed" if sums else "averaged"),
        ("HVDPLUS_CHECK_EVERY", str(check_every())),
        *((f"parameter {i}", str(parameter)) for i, parameter in enumerate(plan.parameters)),
        *((f"request {i}:", ask) for i, ask in enumerate(asks)),
    ]


def first_difference(everyone: Sequence[Items]) -> str:
    """Describe the first item in which the ranks' lists differ."""
    for index in range(max(len(items) for items in everyone)):
        values = defaultdict(list)
        for rank, items in enumerate(everyone):
            values[tuple(items[index]) if index < len(items) else ("", "nothing more")].append(rank)
        if len(values) > 1:
            return ", but ".join(_who_has(*entry) for entry in values.items())
    return "nothing differs"


def _who_has(item: tuple[str, ...], ranks: list[int]) -> str:
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    return f"{who} {item[0]} {item[1]}".replace("  ", " ")
