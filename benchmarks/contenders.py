"""Who takes part in the exchange benchmark: every contender's name, and how the ranks that measure it are started.

A name is `library/carrier/codec`. Contenders with the same library's processes form a group, which is started once;
peers have processes of their own, in which nothing of hvdplus has set anything.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from hosts import Hosts

HERE = Path(__file__).parent
CODECS = (
    "exact",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "ternary",
    "onebit",
    "topk:0.01",
    "randomk:0.01",
    "powersgd:4",
    "auto",
)
STOCK = ("none", "fp16")


@dataclass(frozen=True)
class Group:
    """Processes that several contenders share.

    Args:
        name: what its sockets and logs are called.
        launcher: `horovodrun`, `mpirun`, `ranks` (one process started for every rank, with torchrun's variables) or
            `alone` (one process).
        script: the program of a rank.
        engine: what `HVDPLUS_ENGINE` is set to.
        contenders: beginnings of the names that it measures.
    """

    name: str
    launcher: str
    script: str
    engine: str
    contenders: tuple[str, ...]

    def line(self, hosts: Hosts, slots: int, forward: Sequence[str]) -> list[str]:
        """Return the command line that starts it on the hosts."""
        argv = [sys.executable, str(HERE / self.script)]
        if self.launcher == "horovodrun":
            return hosts.horovodrun(argv, slots=slots)
        if self.launcher == "mpirun":
            return hosts.mpirun(argv, slots=slots, forward=forward)
        return argv


GROUPS = (
    Group("gloo", "horovodrun", "exchange_torch.py", "horovod", ("hvdplus/gloo/",)),
    Group("mpi4py", "mpirun", "exchange_torch.py", "mpi", ("hvdplus/mpi4py/",)),
    Group("stock-gloo", "horovodrun", "exchange_torch.py", "horovod", ("horovod/gloo/",)),
    Group("stock-mpi", "mpirun", "exchange_torch.py", "horovod", ("horovod/mpi/",)),
    Group("ddp", "ranks", "exchange_torch.py", "local", ("ddp/gloo/",)),
    Group("plain", "alone", "exchange_torch.py", "local", ("plain/",)),
    Group("tf-gloo", "horovodrun", "exchange_tensorflow.py", "horovod", ("hvdplus-tf/gloo/",)),
    Group("stock-tf-gloo", "horovodrun", "exchange_tensorflow.py", "horovod", ("horovod-tf/gloo/",)),
    Group("stock-tf-mpi", "mpirun", "exchange_tensorflow.py", "horovod", ("horovod-tf/mpi/",)),
)

ALL = (
    *(f"hvdplus/{carrier}/{codec}" for carrier in ("gloo", "mpi4py") for codec in CODECS),
    *(f"horovod/{carrier}/{codec}" for carrier in ("gloo", "mpi") for codec in STOCK),
    *(f"ddp/gloo/{codec}" for codec in (*STOCK, "powersgd:4")),
    *(f"horovod-tf/{carrier}/{codec}" for carrier in ("gloo", "mpi") for codec in STOCK),
    *(f"hvdplus-tf/gloo/{codec}" for codec in ("exact", "onebit")),
)


def group_of(contender: str) -> Group:
    """Return the group that measures a contender.

    Raises:
        ValueError: none does.
    """
    for group in GROUPS:
        if contender.startswith(group.contenders):
            return group
    known = ", ".join(prefix for group in GROUPS for prefix in group.contenders)
    raise ValueError(f"contender is {contender!r}; a name begins with one of {known} and ends with a codec")


def chosen(patterns: str) -> list[str]:
    """Return the contenders that globs, with blanks between them, name, in the list's order.

    A pattern without wildcards that names nobody in the list is taken as a contender of its own, so that any codec can
    be measured.

    Raises:
        ValueError: a name that nobody can measure, or nobody is named.

    >>> chosen("ddp/*/fp16 hvdplus/mpi4py/int8:block=64")
    ['ddp/gloo/fp16', 'hvdplus/mpi4py/int8:block=64']
    """
    globs = patterns.split()
    found = [name for name in ALL if any(fnmatchcase(name, glob) for glob in globs)]
    others = [glob for glob in globs if glob not in found and not set(glob) & set("*?[")]
    for name in others:
        group_of(name)
    if not found + others:
        raise ValueError(f"{patterns!r} names no contender; there are {', '.join(ALL)}")
    return found + others
