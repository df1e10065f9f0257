"""One initialised job as one rank sees it: the world, the engine, the line between ranks, and what only needs these."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from hvdplus import engines, mpi
from hvdplus.arrays import NumPyArray
from hvdplus.collectives import AllGather, AllReduce, Broadcast, Collectives, LocalCollectives
from hvdplus.errors import LaunchError
from hvdplus.strategy import Strategy
from hvdplus.watch import Watch
from hvdplus.world import World, discover, places

A = TypeVar("A")

log = logging.getLogger("hvdplus")


@dataclass(frozen=True)
class Framework(Generic[A]):
    """What the core must know of a framework to start a job in it.

    ``lend`` and ``read`` turn a NumPy array into the framework's and back; ``host`` makes a host engine's collectives
    serve its arrays; ``horovod`` starts Horovod with ``init``'s arguments and returns its collectives, and
    ``horovod_stop`` ends it. ``late`` says
    that the framework must not be used in ``init``, because a program chooses its devices by local rank after it.
    """

    name: str
    lend: Callable[[NumPyArray], A]
    read: Callable[[A], NumPyArray]
    host: Callable[[Collectives[NumPyArray]], Collectives[A]]
    horovod: Callable[..., Collectives[A]]
    horovod_serves: Callable[[World], bool]
    horovod_stop: Callable[[], object]
    late: bool = False


@dataclass
class Session(Generic[A]):
    """One initialised job. ``cross`` is this host's number among those that have a rank of this local rank."""

    framework: Framework[A]
    world: World
    engine: str
    collectives: Collectives[A]
    watch: Watch
    cross: tuple[int, int] = (0, 1)
    _calls: dict[str, itertools.count[int]] = field(default_factory=dict)
    _met: bool = False

    def meet(self) -> None:
        """Open the line between the ranks and find the neighbours, once; all ranks call this together."""
        if not self._met:
            self._met = True
            self.watch.connect(self.gather)
            _find_neighbours(self)

    def gather(self, payload: bytes, collectives: Collectives[A] | None = None) -> list[bytes]:
        """Return every rank's ``payload``, in rank order; all ranks call this together."""
        self.meet()
        among = collectives or self.collectives
        if among.size == 1:
            return [payload]
        name = self.name("gather", among)
        lengths = self._all(np.array([len(payload)], np.int64), f"{name}.length", among).reshape(-1)
        padded = np.zeros(max(1, int(lengths.max())), np.uint8)
        padded[: len(payload)] = np.frombuffer(payload, np.uint8)
        rows = self._all(padded, name, among)
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

    def broadcast(self, value: NumPyArray, root: int, among: Collectives[A] | None = None) -> NumPyArray:
        """Return ``root``'s ``value``, of any dtype, its shape equal on all ranks; all ranks call this together."""
        self.meet()
        group = among or self.collectives
        if group.size == 1 or value.size == 0:
            return value
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy()
        pending = group.start(Broadcast(self.framework.lend(raw), root), self.name("copy", group))
        answer = self.framework.read(self.watch.wait(pending))
        return np.ascontiguousarray(answer).view(value.dtype).reshape(value.shape)

    def mean(self, value: NumPyArray, among: Collectives[A] | None = None) -> NumPyArray:
        """Return the mean over ranks of ``value`` (fp32 or fp64), shaped alike on all; all ranks call this together."""
        self.meet()
        group = among or self.collectives
        if group.size == 1 or value.size == 0:
            return value
        given = self.framework.lend(np.array(value))
        pending = group.start(AllReduce(given, scale=1.0 / group.size), self.name("mean", group))
        return self.framework.read(self.watch.wait(pending))

    def name(self, kind: str, group: Collectives[A]) -> str:
        """Return the next name for a request of a group: ranks outside it do not count along."""
        calls = self._calls.setdefault(group.label, itertools.count())
        return f"hvdplus.{kind}.{group.label}.{next(calls)}"

    def _all(self, value: NumPyArray, name: str, among: Collectives[A]) -> NumPyArray:
        pending = among.start(AllGather(self.framework.lend(value)), name)
        return self.framework.read(self.watch.wait(pending))


class Holder(Generic[A]):
    """The session of this process in one framework: what ``init()`` and ``shutdown()`` of an adapter are."""

    def __init__(self, framework: Framework[A]) -> None:
        self._framework = framework
        self._session: Session[A] | None = None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Join the job: find this rank, choose the engine (``HVDPLUS_ENGINE``), start it, open the line to all ranks.

        A second call does nothing. Arguments are Horovod's (``comm``, ``process_sets``) and need its engine.

        Raises:
            LaunchError: no engine can serve what the launcher started, or the engine sees another world.
        """
        if self._session is None:
            self._session = start(self._framework, *args, **kwargs)

    def session(self) -> Session[A]:
        """Return the current session.

        Raises:
            LaunchError: ``init()`` was not called.
        """
        if self._session is None:
            raise LaunchError(f"hvdplus is not initialised; call hvdplus.{self._framework.name}.init() first.")
        return self._session

    def is_initialized(self) -> bool:
        """Return whether ``init()`` was called."""
        return self._session is not None

    def shutdown(self) -> None:
        """Leave the job. ``init()`` may be called again afterwards."""
        if self._session is None:
            return
        leaving, self._session = self._session, None
        if leaving.engine == "horovod":
            self._framework.horovod_stop()
        leaving.watch.disconnect()

    def rank(self) -> int:
        """Return this process's rank, 0 to ``size() - 1``."""
        return self.session().world.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self.session().world.size


def start(framework: Framework[A], *args: Any, **kwargs: Any) -> Session[A]:
    """Join the job: find this rank, choose the engine (``HVDPLUS_ENGINE``), start it, open the line to all ranks.

    Args:
        framework: whose arrays are exchanged.
        *args: Horovod's arguments to ``init`` (``comm``, ``process_sets``); they need its engine.
        **kwargs: the same by name.

    Raises:
        LaunchError: no engine can serve what the launcher started, or the engine sees another world.
    """
    world = discover()
    engine = engines.choose(engines.wanted(), world, framework.horovod_serves, mpi.available)
    if (args or kwargs) and engine != "horovod":
        raise LaunchError(f"init() takes arguments with engine 'horovod' only, and this is engine {engine!r}.")
    collectives = _serve(engine, framework, args, kwargs)
    if not args and not kwargs.get("comm"):
        engines.check(world, engine, collectives.rank, collectives.size)
    world = replace(world, rank=collectives.rank, size=collectives.size)
    if world.launcher == "none" and world.size == 1 and multiprocessing.parent_process() is not None:
        log.warning(
            "this process was started by multiprocessing, not by a launcher, and is alone: rank 0 of 1; start ranks "
            "with 'hvdplus run -np N -- python train.py', or set HVDPLUS_RANK and HVDPLUS_SIZE in each process."
        )
    session = Session(framework, world, engine, collectives, Watch(world.rank, world.size))
    if not framework.late:
        session.meet()
    return session


def _serve(engine: str, framework: Framework[A], args: Any, kwargs: Any) -> Collectives[A]:
    if engine == "horovod":
        # A bucket is many arrays fused already: copying several of them into one more buffer costs, and buys nothing.
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(Strategy().bucket_bytes))
        return framework.horovod(*args, **kwargs)
    return framework.host(mpi.MpiCollectives()) if engine == "mpi" else LocalCollectives()


def _find_neighbours(session: Session[Any]) -> None:
    """Fill in local and cross rank by comparing host names, and compare with what the launcher says."""
    world = session.world
    hosts = [host.decode() for host in session.gather(socket.gethostname().encode())]
    place = places(hosts)[world.rank]
    session.cross = place.cross_rank, place.cross_size
    if world.local_rank is not None and os.environ.get("HVDPLUS_LOCAL_RANK"):
        return
    mine = place.local_rank
    if world.local_rank not in (None, mine):
        log.warning(
            "rank %d: the launcher (%s) says local rank %s, but by host names it is %d; using %d.",
            world.rank, world.launcher, world.local_rank, mine, mine,
        )  # fmt: skip
    session.world = replace(world, local_rank=mine, local_size=place.local_size)
