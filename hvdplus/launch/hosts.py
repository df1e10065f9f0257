"""Hosts and their slots: reads them as every launcher's users write them, and lays ranks out on them (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hvdplus.errors import LaunchError

_LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Host:
    """One host, and how many ranks it takes."""

    name: str
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str, source: str = "-H") -> tuple[Host, ...]:
    """Read ``a:2,b:2``; a host without a number has one slot, a host named twice has the slots of both.

    >>> [str(host) for host in parse_hosts("a:2,b,a")]
    ['a:3', 'b:1']

    Raises:
        LaunchError: a part is no host with a number of slots; ``source`` says where the text came from.
    """
    return merged(_host(part.strip(), source) for part in text.split(","))


def parse_hostfile(text: str, source: str = "--hostfile") -> tuple[Host, ...]:
    """Read a host file: ``a slots=2`` (Open MPI, horovodrun), ``a:2`` (MPICH), or a line a slot (PBS, LSF).

    Raises:
        LaunchError: a line is of none of these forms, or there is no host at all.
    """
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    found = merged(_host(_short_form(line), source) for line in lines if line)
    if not found:
        raise LaunchError(f"{source} names no host; write one host a line, as in 'boxa slots=2'.")
    return found


def _short_form(line: str) -> str:
    match = re.fullmatch(r"(\S+)((?:\s+[\w-]+=\S+)+)", line)
    if match is None:
        return line
    options = dict(option.split("=", 1) for option in match[2].split())
    return f"{match[1]}:{options.get('slots', '1')}"


def _host(text: str, source: str) -> Host:
    match = re.fullmatch(r"([\w.-]+)(?::([1-9]\d{0,5}))?", text, re.ASCII)
    if match is None:
        raise LaunchError(f"{source} has {text!r}, which is no host; write NAME or NAME:SLOTS, as in boxa:2,boxb:2.")
    return Host(match[1], int(match[2] or 1))


def merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Add up the slots of hosts that are named more than once, in the order of their first naming."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def total(hosts: Iterable[Host]) -> int:
    """Return the number of all slots."""
    return sum(host.slots for host in hosts)


def listed(hosts: Iterable[Host]) -> str:
    """Write hosts as ``a:2,b:2``."""
    return ",".join(map(str, hosts))


def placed(hosts: tuple[Host, ...], ranks: int) -> tuple[Host, ...]:
    """Lay out ``ranks`` host after host, at most as many as there are slots; what is left goes round the hosts again.

    >>> listed(placed(parse_hosts("a:2,b:2,c:2"), 3)), listed(placed(parse_hosts("a:2,b:1"), 5))
    ('a:2,b:1', 'a:3,b:2')
    """
    counts = []
    left = ranks
    for host in hosts:
        counts.append(min(host.slots, left))
        left -= counts[-1]
    for extra in range(left if hosts else 0):
        counts[extra % len(hosts)] += 1
    return tuple(Host(host.name, count) for host, count in zip(hosts, counts, strict=True) if count)


def is_uniform(hosts: tuple[Host, ...]) -> bool:
    """Say whether all hosts take equally many ranks, of which the last may have fewer."""
    return all(host.slots == hosts[0].slots for host in hosts[:-1]) and hosts[-1].slots <= hosts[0].slots


def is_local(hosts: tuple[Host, ...], here: str) -> bool:
    """Say whether all hosts are this machine, whose name is ``here``."""
    return all(host.name in (*_LOCAL, here, here.split(".", maxsplit=1)[0]) for host in hosts)
