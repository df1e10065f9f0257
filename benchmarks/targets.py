"""What hvdplus must reach against which peers, with ResNet-50's gradients, two hosts and 1 Gbit/s, and in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

WORK, HOSTS, GBIT = "resnet50", 2, 1.0
MEMORY_MULTIPLE = 2.75
"""The most memory that residuals and buffers may take, in multiples of the gradients' size; libraries come on top."""


@dataclass(frozen=True)
class Target:
    """One demand: the best of `ours` is at least so many times as fast as the best of `against` (both globs)."""

    ours: str
    against: str
    at_least: float


TARGETS = (
    Target("hvdplus/*/onebit", "horovod/*/fp16", 10.0),
    Target("hvdplus/*/onebit", "ddp/gloo/fp16", 6.0),
    Target("hvdplus/*/topk:0.01", "ddp/gloo/fp16", 4.0),
    Target("hvdplus/*/randomk:0.01", "ddp/gloo/fp16", 7.0),
    Target("hvdplus/*/powersgd:4", "ddp/gloo/fp16", 3.0),
    Target("hvdplus/*/int8", "ddp/gloo/fp16", 1.5),
    Target("hvdplus/*/int4", "ddp/gloo/fp16", 2.5),
    Target("hvdplus/*/ternary", "ddp/gloo/fp16", 3.5),
    Target("hvdplus/*/fp16", "ddp/gloo/fp16", 0.95),
    Target("hvdplus/*/exact", "ddp/gloo/none", 0.95),
    Target("hvdplus/*/exact", "horovod/*/none", 1.15),
    Target("hvdplus-tf/*/onebit", "horovod-tf/*/fp16", 4.0),
    Target("hvdplus-tf/*/exact", "horovod-tf/*/none", 0.95),
)


@dataclass(frozen=True)
class Verdict:
    """A target and what came out."""

    ours: str
    against: str
    at_least: float
    measured: float
    reached: bool


def verdicts(medians: Mapping[str, float], asked: Sequence[str]) -> list[Verdict]:
    """Judge every target of which both sides were to be measured; one that failed has reached nothing.

    Args:
        medians: seconds of a step, by contender that did not fail.
        asked: all contenders.
    """
    everyone = dict.fromkeys(asked, math.inf) | dict(medians)
    found = []
    for target in TARGETS:
        ours, against = best(target.ours, everyone), best(target.against, everyone)
        if ours and against:
            measured = medians[against] / medians[ours] if ours in medians and against in medians else 0.0
            found.append(Verdict(ours, against, target.at_least, measured, measured >= target.at_least))
    return found


def best(glob: str, medians: Mapping[str, float]) -> str | None:
    """Return the fastest contender that a glob names, or None if it names none.

    >>> best("horovod/*/fp16", {"horovod/mpi/fp16": 0.7, "horovod/gloo/fp16": 1.3, "horovod/mpi/none": 0.1})
    'horovod/mpi/fp16'
    """
    names = [name for name in medians if fnmatchcase(name, glob)]
    return min(names, key=lambda name: medians[name], default=None)
