"""How the driver and the ranks of a benchmark talk: by Unix sockets in the run's folder, so nothing is on the wire."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Protocol

FOLDER = "BENCH_FOLDER"
GROUP = "BENCH_GROUP"
INTERFACE = "BENCH_INTERFACE"


@dataclass(frozen=True)
class Turn:
    """What a rank is told to measure.

    Args:
        contender: its name.
        work: whose gradients, a name of `gradients.WORK`.
        warmup: steps that are not counted.
        steps: steps that are timed.
        seconds: no further step begins when the timed ones have taken as long; one is always timed.
        first: number of the first step, from which its gradients follow.
    """

    contender: str
    work: str
    warmup: int
    steps: int
    seconds: float
    first: int


@dataclass
class Measured:
    """What a rank measured in a turn.

    Args:
        seconds: of every timed step, from just before backward until the averaged gradients are there.
        sent: bytes that left this host's interface in all timed steps and between them.
        sample: what tells the last step's means from others, which must be the same on all ranks; see `Contender`.
        peak_rss: the most memory that this process ever had, in bytes.
        own: what the contender counted itself.
        error: a traceback, if it failed.
    """

    seconds: list[float] = field(default_factory=list)
    sent: int = 0
    sample: list[float] = field(default_factory=list)
    peak_rss: int = 0
    own: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class Contender(Protocol):
    """One way to exchange gradients, set up on a rank."""

    def prepare(self, step: int) -> None:
        """Have this step's gradients ready and the last step's forgotten; not timed."""

    def exchange(self) -> None:
        """Do what a training step does from backward until the means are there; timed."""

    def sample(self) -> list[float]:
        """Return numbers that are the same on all ranks where all their means are, the sum of squares last."""

    def counted(self) -> dict[str, Any]:
        """Return what the contender itself counted."""


Build = Callable[[str, str], Contender]  # from a contender's name and the name of the work


def serve(rank: int, size: int, build: Build) -> None:
    """Take turns from the driver until it says that this was the last."""
    folder, group = Path(os.environ[FOLDER]), os.environ[GROUP]
    with barrier(folder / f"{group}.ranks", rank, size) as wait, Client(str(folder / group), "AF_UNIX") as driver:
        driver.send((rank, os.getpid()))
        while (turn := driver.recv()) is not None:
            try:
                driver.send(measure(turn, build, wait))
            except Exception:  # whatever it is, the driver shall show it
                driver.send(Measured(error=traceback.format_exc()))
                raise


def measure(turn: Turn, build: Build, wait: Callable[[bool], bool]) -> Measured:
    """Take one turn: every rank begins each step at the same moment, and rank 0 decides when it is enough."""
    contender, found, before = build(turn.contender, turn.work), Measured(), 0
    for number in range(turn.warmup + turn.steps):
        if not wait(len(found.seconds) == 0 or sum(found.seconds) < turn.seconds):
            break
        contender.prepare(turn.first + number)
        wait(True)
        if number == turn.warmup:
            before = sent_bytes()
        begin = time.perf_counter()
        contender.exchange()
        took = time.perf_counter() - begin
        if number >= turn.warmup:
            found.seconds.append(took)
    wait(True)  # all have received, so all has been sent
    found.sent = sent_bytes() - before
    found.peak_rss = peak_rss()  # before anything is looked at, which takes memory, too
    found.sample, found.own = contender.sample(), contender.counted()
    return found


@contextmanager
def barrier(path: Path, rank: int, size: int) -> Iterator[Callable[[bool], bool]]:
    """Yield a function that waits for all ranks and returns what rank 0 gave it."""
    if rank == 0:
        with Listener(str(path), "AF_UNIX", backlog=size) as listener:
            others = [listener.accept() for _ in range(size - 1)]

            def lead(go: bool) -> bool:
                for other in others:
                    other.recv()
                for other in others:
                    other.send(go)
                return go

            yield lead
    else:
        with _connect(path) as root:

            def follow(_: bool) -> bool:
                root.send(None)
                return bool(root.recv())

            yield follow


def _connect(path: Path, patience: float = 60.0) -> Connection[Any, Any]:
    """Connect to a rank that may not be listening yet."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return Client(str(path), "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def sent_bytes() -> int:
    """Return how many bytes have left this host by the interface of the benchmark, as the kernel counts them."""
    return int(Path("/sys/class/net", os.environ[INTERFACE], "statistics/tx_bytes").read_text())


def peak_rss() -> int:
    """Return the most memory that this process has had, in bytes (`VmHWM` in proc(5))."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")
