"""Reads how far a build is from the lines that make prints."""

from __future__ import annotations

import re
from dataclasses import dataclass

STEP = re.compile(r"\[\s*(\d{1,3})%\]\s+(Building|Linking|Built)\s+(.+)")


@dataclass(frozen=True)
class Step:
    """One line of progress: percent done, and what is being worked on."""

    percent: int
    what: str


def parse_step(line: str) -> Step | None:
    """Return the progress in a line, or None.

    >>> parse_step("  [ 42%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/ready_event.cc.o")
    Step(percent=42, what='ready_event.cc (pytorch)')
    """
    match = STEP.search(line)
    if match is None:
        return None
    percent, verb, rest = match.groups()
    return Step(int(percent), short_name(verb, rest.strip()))


def short_name(verb: str, rest: str) -> str:
    """Shorten what make says to a file or target name."""
    if verb == "Built":
        return ""  # not what is being worked on
    path = rest.rsplit(maxsplit=1)[-1]
    name = path.rsplit("/", 1)[-1].removesuffix(".o")
    target = re.search(r"CMakeFiles/([^/]+)\.dir/", path)
    if verb == "Linking":
        return f"linking {name}"
    return f"{name} ({target.group(1)})" if target else name


class Progress:
    """The furthest step so far: make with several jobs prints percentages out of order."""

    def __init__(self) -> None:
        self.step = Step(0, "configuring")

    def feed(self, line: str) -> Step | None:
        """Take a line of the log; return the new state if the line changed it."""
        step = parse_step(line)
        if step is None:
            return None
        self.step = Step(max(step.percent, self.step.percent), step.what or self.step.what)
        return self.step
