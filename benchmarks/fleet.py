"""The processes of a benchmark: started once, asked in turn, and frozen while it is another's turn.

Horovod's background threads talk all the time, and an idle MPI rank may spin; what is not being measured is stopped
with SIGSTOP, so that it takes nothing from what is.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any

import protocol
from contenders import Group
from hosts import Hosts
from protocol import Measured, Turn

START_SECONDS = 240.0
END_SECONDS = 10.0
POLL_SECONDS = 0.2


class GroupError(RuntimeError):
    """A group's processes did not start, did not answer or failed; the message says what they wrote last."""


class Running:
    """The processes of one group.

    Args:
        group: which.
        hosts: where they run.
        slots: ranks on each host.
        env: what they get on top of the hosts' environment.

    Raises:
        GroupError: they did not start.
    """

    def __init__(self, group: Group, hosts: Hosts, slots: int, env: Mapping[str, str]) -> None:
        self.group, self.size = group, 1 if group.launcher == "alone" else slots * len(hosts)
        self._log_path = hosts.folder / f"{group.name}.log"
        self._log: IO[str] = self._log_path.open("w")
        self._processes: list[subprocess.Popen[str]] = []
        self._ranks: dict[int, Connection[Any, Any]] = {}
        self._pids: list[int] = []
        for leftover in (group.name, f"{group.name}.ranks"):
            (hosts.folder / leftover).unlink(missing_ok=True)
        own = {protocol.FOLDER: str(hosts.folder), protocol.INTERFACE: hosts.interface, protocol.GROUP: group.name}
        self._start(hosts, slots, {**env, **own, "HVDPLUS_ENGINE": group.engine})

    def _start(self, hosts: Hosts, slots: int, env: Mapping[str, str]) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(hosts.folder / self.group.name))
            listener.listen(self.size)
            listener.settimeout(POLL_SECONDS)
            line = self.group.line(hosts, slots, tuple(env))
            if self.group.launcher == "ranks":
                self._processes = hosts.start_ranks(line, env, slots=slots, stdout=self._log, stderr=self._log)
            else:
                self._processes = [hosts.popen(hosts[0], line, env, stdout=self._log, stderr=self._log)]
            try:
                self._accept(listener)
            except GroupError:
                self.kill()
                raise
        self.freeze()

    def _accept(self, listener: socket.socket) -> None:
        """Wait for every rank to call."""
        deadline = time.monotonic() + START_SECONDS
        while len(self._ranks) < self.size:
            with suppress(TimeoutError):
                connection: Connection[Any, Any] = Connection(listener.accept()[0].detach())
                rank, pid = connection.recv()
                self._ranks[rank] = connection
                self._pids.append(pid)
            self._check_start(deadline)

    def _check_start(self, deadline: float) -> None:
        """Give up where a launcher has ended before all ranks were there."""
        ended = [code for process in self._processes if (code := process.poll()) is not None]
        if ended or time.monotonic() > deadline:
            why = f"ended with {ended}" if ended else f"did not start in {START_SECONDS:.0f} s"
            raise GroupError(f"group {self.group.name} {why}: {self.said()}")

    def said(self) -> str:
        """Return the end of what its processes have written."""
        return self._log_path.read_text(errors="replace").strip()[-2000:]

    def freeze(self) -> None:
        """Stop every rank where it is."""
        self._signal(signal.SIGSTOP)

    def ask(self, turn: Turn, timeout: float) -> list[Measured]:
        """Let all ranks take a turn and return what they measured, by rank.

        Raises:
            GroupError: a rank failed or did not answer in time; the group cannot go on.
        """
        self._signal(signal.SIGCONT)
        for connection in self._ranks.values():
            connection.send(turn)
        found = {rank: self._answer(rank, turn, timeout) for rank in sorted(self._ranks)}
        self.freeze()
        return [found[rank] for rank in sorted(found)]

    def _answer(self, rank: int, turn: Turn, timeout: float) -> Measured:
        connection = self._ranks[rank]
        try:
            if not connection.poll(timeout):
                raise GroupError(f"rank {rank} did not finish {turn.contender} in {timeout:.0f} s: {self.said()}")
            answer: Measured = connection.recv()
        except (EOFError, ConnectionResetError) as gone:
            raise GroupError(f"rank {rank} ended in {turn.contender}: {self.said()}") from gone
        if answer.error:
            raise GroupError(f"rank {rank} failed in {turn.contender}: {answer.error}")
        return answer

    def close(self) -> None:
        """Tell the ranks that this was all, and see that they end."""
        self._signal(signal.SIGCONT)
        for connection in self._ranks.values():
            with suppress(OSError):
                connection.send(None)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End everything at once."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for connection in self._ranks.values():
            connection.close()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class Fleet:
    """Starts groups when they are first asked, and again after they have failed; a context that ends them all.

    Args:
        hosts: where they run.
        slots: ranks on each host.
        env: what all ranks get on top of the hosts' environment.
    """

    def __init__(self, hosts: Hosts, slots: int, env: Mapping[str, str]) -> None:
        self.hosts = hosts
        self._slots, self._env = slots, env
        self._running: dict[str, Running] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running.values():
            running.close()

    def ask(self, group: Group, turn: Turn, timeout: float) -> list[Measured]:
        """Let a group take a turn; see `Running.ask`."""
        if group.name not in self._running:
            self._running[group.name] = Running(group, self.hosts, self._slots, self._env)
        running = self._running[group.name]
        try:
            return running.ask(turn, timeout)
        except GroupError:
            del self._running[group.name]
            running.kill()
            raise
