"""Version strings as tuples, just precise enough to compare releases."""

from __future__ import annotations

import re


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version.

    >>> release("2.13.0+cpu")
    (2, 13, 0)
    >>> release("unknown")
    ()
    """
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def major(version: str) -> str:
    """Return the first number of a version, or the text itself where it has none."""
    numbers = release(version)
    return str(numbers[0]) if numbers else version
