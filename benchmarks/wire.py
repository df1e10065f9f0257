"""The speed of the wire itself: one TCP stream between two hosts, nothing else.

Run with an address it sends there as fast as it can; run without one it receives and prints Gbit/s of payload.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

from hosts import Hosts

PORT = 5201
SKIPPED_SECONDS = 0.3  # until the stream has found its speed, and the link's first burst is through
MEASURED_SECONDS = 1.2
CHUNK = bytearray(1 << 18)


def measure(hosts: Hosts) -> float:
    """Return what one stream from the second host to the first carries, in Gbit/s of payload.

    Raises:
        RuntimeError: nothing came through.
    """
    script = str(Path(__file__))
    receiver = hosts.popen(hosts[0], [sys.executable, script], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    receiver.stdout.readline()  # it listens
    limit = SKIPPED_SECONDS + MEASURED_SECONDS + 20.0
    sent = hosts.run(hosts[1], [sys.executable, script, hosts[0].address], timeout=limit)
    rate, _ = receiver.communicate(timeout=limit)
    if receiver.returncode:
        raise RuntimeError(f"the raw transfer from {hosts[1].name} to {hosts[0].name} failed: {sent.stdout}")
    return float(rate)


def receive() -> None:
    """Take one connection and print what it brought a second, after the first moments."""
    with socket.create_server(("0.0.0.0", PORT)) as server:
        print("listening", flush=True)
        stream = server.accept()[0]
        _drain(stream, SKIPPED_SECONDS)
        begin = time.perf_counter()
        taken = _drain(stream, MEASURED_SECONDS)
        print(taken * 8e-9 / (time.perf_counter() - begin))


def send(address: str) -> None:
    """Send until the other side has had enough."""
    with socket.create_connection((address, PORT), timeout=10) as stream:
        try:
            while True:
                stream.sendall(CHUNK)
        except (BrokenPipeError, ConnectionResetError):
            return


def _drain(stream: socket.socket, seconds: float) -> int:
    """Read for a time; return how many bytes came."""
    end, taken = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        taken += stream.recv_into(CHUNK)
    return taken


if __name__ == "__main__":
    send(sys.argv[1]) if len(sys.argv) > 1 else receive()
