"""What each of two ranks runs to measure the way between them."""

from __future__ import annotations

import json
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

from hvdplus.world import discover

MARK = "hvdplus-pingpong:"
SIZES = (8, 2**10, 2**16, 2**20, 2**24)
_SECONDS = 0.3  # a size; also the longest trip after which no larger size is tried
_WARM_UP, _LEAST, _MOST = 2, 3, 500
_CONNECT_SECONDS = 30.0


@dataclass(frozen=True)
class Row:
    """One size of message: bytes, half of a round trip in microseconds, and megabytes (10^6 bytes) a second."""

    size: int
    microseconds: float
    megabytes_a_second: float


Buffer: TypeAlias = bytes | memoryview


class _Room:
    """A buffer that only grows: making a new one for each message would be measured, too."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def of(self, count: int) -> memoryview:
        """Return room for ``count`` bytes."""
        if count > len(self._bytes):
            self._bytes = bytearray(count)
        return memoryview(self._bytes)[:count]


class Wire(Protocol):
    """One end of a connection between two ranks."""

    def send(self, data: Buffer) -> None:
        """Send a message; an empty one ends the talk."""

    def receive(self) -> Buffer:
        """Wait for a message; it is there until the next one is waited for."""


class TcpWire:
    """Messages with their length in front, over one TCP connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._room = _Room()

    @classmethod
    def open(cls, rank: int, host: str, port: int) -> TcpWire:
        """Wait as rank 0 for the other rank, or connect to it, patiently: it may still be starting."""
        if rank == 0:
            with socket.create_server(("", port)) as server:
                server.settimeout(_CONNECT_SECONDS)
                return cls(server.accept()[0])
        end = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                return cls(socket.create_connection((host, port), timeout=_CONNECT_SECONDS))
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def send(self, data: Buffer) -> None:
        """Write length and message."""
        self._socket.sendall(struct.pack("!Q", len(data)))
        self._socket.sendall(data)

    def receive(self) -> Buffer:
        """Read length and message."""
        return self._read(struct.unpack("!Q", self._read(8))[0])

    def _read(self, count: int) -> memoryview:
        message = rest = self._room.of(count)
        while len(rest):
            got = self._socket.recv_into(rest)
            if not got:
                raise ConnectionError("the other rank hung up")
            rest = rest[got:]
        return message


class MpiWire:
    """Messages over MPI, between the first two ranks."""

    def __init__(self, rank: int) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._comm: Any = MPI.COMM_WORLD
        self._other = 1 - rank
        self._room = _Room()
        if self._comm.Get_size() != 2:
            raise ConnectionError(f"MPI sees {self._comm.Get_size()} ranks, not 2: it is not the one that started them")

    def send(self, data: Buffer) -> None:
        """Send bytes."""
        self._comm.Send([data, self._mpi.BYTE], dest=self._other)

    def receive(self) -> Buffer:
        """Ask for the length, then receive."""
        status = self._mpi.Status()
        self._comm.Probe(source=self._other, status=status)
        message = self._room.of(status.Get_count(self._mpi.BYTE))
        self._comm.Recv([message, self._mpi.BYTE], source=self._other)
        return message


def measure(wire: Wire, clock: Callable[[], float] = time.perf_counter) -> list[Row]:
    """Send messages of growing size to a rank that echoes them; the median trip of each size counts."""
    rows: list[Row] = []
    for size in SIZES:
        seconds = statistics.median(_trips(wire, b"\0" * size, clock)) / 2
        rows.append(Row(size, seconds * 1e6, size / seconds / 1e6))
        if seconds > _SECONDS:
            break
    wire.send(b"")
    return rows


def _trips(wire: Wire, message: bytes, clock: Callable[[], float]) -> list[float]:
    begin = clock()
    trips: list[float] = []
    while len(trips) < _WARM_UP + _LEAST or (len(trips) < _MOST and clock() - begin < _SECONDS):
        sent = clock()
        wire.send(message)
        wire.receive()
        trips.append(clock() - sent)
    return trips[_WARM_UP:]


def echo(wire: Wire) -> None:
    """Send back what comes, until an empty message comes."""
    while len(data := wire.receive()):
        wire.send(data)


def main(way: str, host: str, port: str) -> None:
    """Be one of the two ranks; rank 0 prints what it measured as one line of JSON."""
    rank = discover(require_launcher=True).rank
    wire = MpiWire(rank) if way == "mpi" else TcpWire.open(rank, host, int(port))
    if rank == 1:
        echo(wire)
        return
    rows = measure(wire)
    sys.stdout.write(f"{MARK} {json.dumps([asdict(row) for row in rows])}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
