"""What ``init()`` sets up: the world, the engine, the line between ranks; and the questions about them."""

from __future__ import annotations

import itertools
import logging
import socket
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hvdplus import engines, mpi
from hvdplus.collectives import AllGather, Broadcast, Collectives, LocalCollectives
from hvdplus.errors import LaunchError
from hvdplus.watch import Watch
from hvdplus.world import World, discover
from hvdplus_torch._engines import HorovodCollectives, HostBridge, horovod, horovod_serves

log = logging.getLogger("hvdplus")


@dataclass
class Session:
    """One initialised job, as this rank sees it."""

    world: World
    engine: str
    collectives: Collectives[torch.Tensor]
    watch: Watch
    cross: tuple[int, int] = (0, 1)
    _calls: itertools.count[int] = field(default_factory=itertools.count)

    def gather(self, payload: bytes, collectives: Collectives[torch.Tensor] | None = None) -> list[bytes]:
        """Return every rank's ``payload``, in rank order; all ranks call this together."""
        among = collectives or self.collectives
        if among.size == 1:
            return [payload]
        name = f"hvdplus.gather.{next(self._calls)}"
        lengths = self.watch.wait(among.start(AllGather(torch.tensor([len(payload)])), f"{name}.length"))
        longest = max(1, int(lengths.max()))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
        everyone = self.watch.wait(among.start(AllGather(padded), name))
        return [bytes(row[: int(n)].tolist()) for row, n in zip(everyone, lengths.flatten(), strict=True)]

    def broadcast(
        self, tensor: torch.Tensor, root: int, name: str, collectives: Collectives[torch.Tensor] | None = None
    ) -> None:
        """Overwrite ``tensor``, of any dtype and layout, with ``root``'s."""
        among = collectives or self.collectives
        if among.size == 1 or tensor.numel() == 0:
            return
        flat = tensor.detach().contiguous().reshape(-1).clone()
        as_bytes = torch.view_as_real(flat) if flat.is_complex() else flat
        pending = among.start(Broadcast(as_bytes.reshape(-1).view(torch.uint8), root), f"hvdplus.broadcast.{name}")
        answer = self.watch.wait(pending).view(as_bytes.dtype).view(as_bytes.shape)
        whole = torch.view_as_complex(answer) if flat.is_complex() else answer
        with torch.no_grad():
            tensor.copy_(whole.view(tensor.shape))


_current: Session | None = None


def init(*args: Any, **kwargs: Any) -> None:
    """Join the job: find this rank, choose the engine (``HVDPLUS_ENGINE``), start it, open the line to all ranks.

    A second call does nothing. Arguments are Horovod's (``comm``, ``process_sets``) and need its engine.

    Raises:
        LaunchError: no engine can serve what the launcher started, or the engine sees another world.
    """
    global _current
    if _current is not None:
        return
    world = discover()
    engine = engines.choose(engines.wanted(), world, horovod_serves, mpi.available)
    if (args or kwargs) and engine != "horovod":
        raise LaunchError(f"init() takes arguments with engine 'horovod' only, and this is engine {engine!r}.")
    collectives = _start(engine, args, kwargs)
    if not args and not kwargs.get("comm"):
        engines.check(world, engine, collectives.rank, collectives.size)
    watch = Watch(collectives.rank, collectives.size)
    session = Session(replace(world, rank=collectives.rank, size=collectives.size), engine, collectives, watch)
    watch.connect(session.gather)
    _find_neighbours(session)
    _current = session


def _start(engine: str, args: Any, kwargs: Any) -> Collectives[torch.Tensor]:
    if engine == "horovod":
        horovod().init(*args, **kwargs)
        return HorovodCollectives()
    return HostBridge(mpi.MpiCollectives()) if engine == "mpi" else LocalCollectives()


def _find_neighbours(session: Session) -> None:
    """Fill in local and cross rank by comparing host names, and compare with what the launcher says."""
    world = session.world
    hosts = session.gather(socket.gethostname().encode())
    local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    alike = [rank for rank, place in enumerate(local) if place == local[world.rank]]
    session.cross = alike.index(world.rank), len(alike)
    if world.launcher == "override" and world.local_rank is not None:
        return
    mine = local[world.rank]
    if world.local_rank not in (None, mine):
        log.warning(
            "rank %d: the launcher (%s) says local rank %s, but by host names it is %d; using %d.",
            world.rank, world.launcher, world.local_rank, mine, mine,
        )  # fmt: skip
    session.world = replace(world, local_rank=mine, local_size=hosts.count(hosts[world.rank]))


def session() -> Session:
    """Return the current session.

    Raises:
        LaunchError: ``init()`` was not called.
    """
    if _current is None:
        raise LaunchError("hvdplus is not initialised; call hvdplus.torch.init() first.")
    return _current


def is_initialized() -> bool:
    """Return whether ``init()`` was called."""
    return _current is not None


def shutdown() -> None:
    """Leave the job. ``init()`` may be called again afterwards."""
    global _current
    if _current is None:
        return
    leaving, _current = _current, None
    leaving.watch.disconnect()
    if leaving.engine == "horovod":
        horovod().shutdown()


def rank() -> int:
    """Return this process's rank, 0 to ``size() - 1``."""
    return session().world.rank


def size() -> int:
    """Return the number of ranks."""
    return session().world.size


def local_rank() -> int:
    """Return the rank among the ranks on this host."""
    return session().world.local_rank or 0


def local_size() -> int:
    """Return the number of ranks on this host."""
    return session().world.local_size or 1


def cross_rank() -> int:
    """Return the number of this host among the hosts that have a rank of this local rank."""
    return session().cross[0]


def cross_size() -> int:
    """Return the number of hosts that have a rank of this local rank."""
    return session().cross[1]


def device() -> torch.device:
    """Return this rank's own device: its GPU by local rank (also where it sees only one), else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", local_rank() % count) if count else torch.device("cpu")

