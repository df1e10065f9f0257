"""Knows how the other ranks are, over a line of its own, so that a failure is heard and a hang is explained.

Rank 0 is the hub of a star of TCP connections that carry one JSON object a line. Nothing is sent while all is well;
a rank that fails says so before it dies, a rank that vanishes is noticed by its closed connection, and a rank
that has waited too long asks all others where they are.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import json
import logging
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from hvdplus.collectives import Pending
from hvdplus.errors import ExchangeError, StrategyError

log = logging.getLogger("hvdplus")

_ANSWER_SECONDS = 2.0  # how long a rank has to say where it is
_DIED = "died: its connection closed without a word (killed, or crashed)"
_SPEAK_SECONDS = 1.0  # how long the others have to repeat a failure before the failing rank has the last word
_PART_SECONDS = 5.0  # how long who leaves waits for the others to leave
_LEFT_SECONDS = 3.0  # how long an exchange may go on after one of its ranks has left


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not value > 0:
        raise StrategyError(f"{name}={text!r} must be a number of seconds above 0; unset it for {default:g}.")
    return value


@dataclass
class Position:
    """Where this rank is: exchange number, what it waits for, since when (``time.monotonic()``)."""

    step: int = 0
    what: str = "before the first exchange"
    since: float = 0.0
    waiting: bool = False


class Watch:
    """One rank's ear and mouth. ``position`` is kept up to date by whoever exchanges."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.host = socket.gethostname()
        self.limit = _seconds("HVDPLUS_TIMEOUT", 600.0)
        self.warn_after = _seconds("HVDPLUS_WARN", 60.0)
        self.position = Position(since=time.monotonic())
        self.failure: str | None = None
        self.left: dict[int, float] = {}
        self.raised = False  # this rank ends with an error: its engine cannot be shut down in peace
        self.echo: ExchangeError | None = None  # the error that tells of somebody else's failure
        self._statuses: dict[int, dict[str, Any]] = {}
        self._hosts: list[str] = []
        self._line: _Line | None = None
        self._hub: _Hub | None = None
        self._closed = threading.Event()
        self._process = os.getpid()  # a forked child has the sockets too, but it is not the rank

    # -- waiting ----------------------------------------------------------------------------------------------

    def at(self, step: int, what: str) -> None:
        """Note where this rank is now."""
        self.position = Position(step, what, time.monotonic())

    def wait(self, pending: Pending[Any]) -> Any:
        """Return the answer to ``pending``.

        Raises:
            ExchangeError: another rank failed or left, or nothing came within ``HVDPLUS_TIMEOUT`` seconds; it names
                the ranks, their hosts, the step and the bucket.
        """
        self.position.waiting = True
        try:
            if not pending.done():
                self._poll(pending)
            return pending.result()
        except Exception as error:
            if error is self.echo:
                raise
            raise self.translated(error) from error
        finally:
            self.position.waiting = False

    def _poll(self, pending: Pending[Any]) -> None:
        begin = time.monotonic()
        warn_at, end_at = begin + self.warn_after, begin + self.limit
        ask_at = end_at - min(_ANSWER_SECONDS, self.limit / 2)  # so that answers are there when the time is over
        last = ask_at + _ANSWER_SECONDS
        delay, longest = 2e-5, 5e-5 if getattr(pending, "moves_when_asked", False) else 1e-3
        while not pending.done():
            time.sleep(delay)
            delay = min(delay * 1.3, longest)
            now = time.monotonic()
            if self.failure is not None:
                raise self._error(self.failure)
            if self.left and now - max(begin, min(self.left.values())) > _LEFT_SECONDS and not pending.done():
                raise self._error(self._who_left())
            if now > warn_at:
                warn_at = now + self.warn_after
                log.warning(
                    "rank %d waits in %s, %.0f s so far: %s", self.rank, self._here(), now - begin, self.explain()
                )
            if now > ask_at:
                ask_at = float("inf")
                self._ask()
            if now > end_at and (self._all_answered() or now > last):
                raise self._error(f"nothing came within HVDPLUS_TIMEOUT={self.limit:g} s: {self._answers()}")

    def translated(self, error: Exception) -> ExchangeError:
        """Turn an engine's own complaint into ours, once the cause has had time to arrive."""
        end = time.monotonic() + _ANSWER_SECONDS
        while self.failure is None and not self.left and time.monotonic() < end and self._line is not None:
            time.sleep(0.01)
        left = self._who_left() if self.left else f"the engine gave up: {error}"
        return self._error(self.failure or left, like=error)

    def _error(self, reason: str, like: Exception | None = None) -> ExchangeError:
        self.raised = True
        message = f"rank {self.rank} ({self.host}) cannot finish {self._here()}: {reason}"
        kind: type[ExchangeError] = ExchangeError
        if like is not None and not isinstance(like, ExchangeError):
            # Frameworks catch their engine's own class (Horovod Elastic does), so the error is both.
            with contextlib.suppress(TypeError):
                kind = type("ExchangeError", (ExchangeError, type(like)), {"__module__": ExchangeError.__module__})
        self.echo = kind(message)
        return self.echo

    def _here(self) -> str:
        return f"step {self.position.step}, {self.position.what}"

    def _who_left(self) -> str:
        ranks = ", ".join(self._name(rank) for rank in sorted(self.left))
        return (
            f"{ranks} has ended its program and will not come; if nothing failed there, give every rank the same "
            f"number of batches, or end them together (Horovod's join())"
        )

    def _name(self, rank: int) -> str:
        host = self._hosts[rank] if rank < len(self._hosts) else "host unknown"
        return f"rank {rank} ({host})"

    def explain(self) -> str:
        """Ask every rank where it is and return a sentence about those that are elsewhere."""
        self._ask()
        end = time.monotonic() + _ANSWER_SECONDS
        while not self._all_answered() and time.monotonic() < end:
            time.sleep(0.01)
        return self._answers()

    def _ask(self) -> None:
        self._statuses = {}
        if self._line is not None:
            self._line.send({"ask": self.rank})

    def _all_answered(self) -> bool:
        return self._line is None or len(self._statuses) == self.size - 1

    def _answers(self) -> str:
        """Say what the ranks have answered so far."""
        if self._line is None:
            return "no rank can be asked, there is no line between them"
        late = [self._describe(rank) for rank in range(self.size) if rank != self.rank]
        return "; ".join(text for text in late if text) or "all ranks are in the same exchange, so the network is stuck"

    def _describe(self, rank: int) -> str:
        if rank in self.left:
            return f"{self._name(rank)} has ended its program"
        status = self._statuses.get(rank)
        if status is None:
            return f"{self._name(rank)} does not answer (stopped, or cut off)"
        here = (self.position.step, self.position.what)
        if status["waiting"] and (status["step"], status["what"]) == here:
            return ""
        return (
            f"{self._name(rank)} has not arrived: it is at step {status['step']}, {status['what']} "
            f"since {status['seconds']:.0f} s, in {status['line']}"
        )

    # -- the line ---------------------------------------------------------------------------------------------

    def connect(self, gather: Callable[[bytes], list[bytes]]) -> None:
        """Open the line between all ranks; ``gather`` is an all-gather of bytes over the engine.

        Where no connection comes about (a firewall), all ranks go on without it and say so once.
        """
        if self.size == 1:
            return
        if self.rank == 0:
            self._hub = _Hub(self.size)
        offer = json.dumps(self._hub.offer if self._hub else {}).encode()
        found = json.loads(gather(offer)[0])
        self._line = _Line.open(found, self.rank)
        answers = [json.loads(answer) for answer in gather(json.dumps([self.host, bool(self._line)]).encode())]
        self._hosts = [host for host, _ in answers]
        if not all(connected for _, connected in answers):
            self._line = None
            log.warning(
                "rank %d: no line to rank 0 on port %s; a failing rank is noticed late", self.rank, found["port"]
            )
            return
        threading.Thread(target=self._listen, name="hvdplus-watch", daemon=True).start()
        self._hook()

    def _listen(self) -> None:
        line = self._line
        assert line is not None
        while not self._closed.is_set():
            message = line.receive()
            if message is None:
                if not self._closed.is_set() and self.failure is None and self.rank != 0 and 0 not in self.left:
                    self.failure = f"{self._name(0)} {_DIED}"
                return
            self._heard(message, line)

    def _heard(self, message: dict[str, Any], line: _Line) -> None:
        if "ask" in message and message["ask"] != self.rank:
            line.send({"status": self._status(), "to": message["ask"]})
        elif "status" in message:
            self._statuses[message["status"]["rank"]] = message["status"]
        elif "left" in message:
            self.left[message["left"]] = time.monotonic()
        elif "failed" in message and message["rank"] != self.rank and self.failure is None:
            self.failure = message["failed"]
        elif "died" in message and self.failure is None:
            self.failure = f"{self._name(message['died'])} {_DIED}"

    def _status(self) -> dict[str, Any]:
        here = self.position
        return {
            "rank": self.rank,
            "step": here.step,
            "what": here.what,
            "waiting": here.waiting,
            "seconds": time.monotonic() - here.since,
            "line": _main_thread_line(),
        }

    # -- the end ----------------------------------------------------------------------------------------------

    def _hook(self) -> None:
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.fail(kind, error, trace)
            if error is self.echo:
                print(f"hvdplus: {error}", file=sys.stderr, flush=True)
            else:
                before(kind, error, trace)

        sys.excepthook = hook
        atexit.register(self.close)

    def fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tell all ranks that this one ends with ``error``, and give them time to say so first."""
        if self._line is None or self._closed.is_set() or os.getpid() != self._process:
            return
        self.raised = True
        frames = traceback.extract_tb(trace)
        where = f" in {_short(frames[-1])}" if frames else ""
        text = "".join(traceback.format_exception_only(kind, error)).strip()
        what = (
            f"rank {self.rank} ({self.host}) failed at step {self.position.step}, {self.position.what}{where}: {text}"
        )
        if error is not self.echo:
            self._line.send({"failed": what, "rank": self.rank})
            time.sleep(_SPEAK_SECONDS)

    def close(self) -> None:
        """Leave. After a failure the process ends here: an engine's own shutdown would wait for the dead."""
        if self._closed.is_set() or os.getpid() != self._process:
            return
        self._closed.set()
        if self._line is not None:
            if not self.raised:
                self._line.send({"left": self.rank})
            self._line.close()
        if self._hub is not None:
            self._hub.close(grace=0.1)
        if self.raised:
            sys.stdout.flush()
            sys.stderr.flush()
            if self.echo is not None:
                time.sleep(3 * _SPEAK_SECONDS)  # a launcher kills the rest when the first one exits
            os._exit(1)

    def disconnect(self) -> None:
        """Leave in peace, as ``shutdown()`` does, once all others leave too.

        Who initialised again while another rank still clears up could meet what that rank leaves behind.
        """
        kind, error, trace = sys.exc_info()
        if kind is not None and error is not None and not isinstance(error, SystemExit):
            self.fail(kind, error, trace)  # shutdown() in a `finally:` of a program that fails
        self.raised = False
        atexit.unregister(self.close)
        if self._line is not None and not self._closed.is_set():
            self._line.send({"left": self.rank})
            end = time.monotonic() + _PART_SECONDS
            while len(self.left) < self.size - 1 and self.failure is None and time.monotonic() < end:
                time.sleep(0.002)
        self.close()


class _Line:
    """A socket that carries JSON objects, one a line."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = sock.makefile("rb")
        self._lock = threading.Lock()

    @classmethod
    def open(cls, offer: dict[str, Any], rank: int) -> _Line | None:
        """Connect to the hub on the first of its addresses that answers with the token."""
        here = offer.get("host") == socket.gethostname()
        for address in (["127.0.0.1"] if here else []) + offer["addresses"]:
            with contextlib.suppress(OSError):
                sock = socket.create_connection((address, offer["port"]), timeout=2.0)
                line = cls(sock)
                line.send({"hello": offer["token"], "rank": rank})
                if (line.receive() or {}).get("welcome") == offer["token"]:
                    sock.settimeout(None)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    return line
        return None

    def send(self, message: dict[str, Any]) -> None:
        """Send, in silence if the other end is gone."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, None at the end."""
        with contextlib.suppress(OSError, ValueError):
            text = self._reader.readline()
            return json.loads(text) if text else None
        return None

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class _Hub:
    """Rank 0's switchboard: it passes every message on to whom it is for."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._server = socket.create_server(("", 0), backlog=size)
        self._token = secrets.token_hex(16)
        self._peers: dict[int, socket.socket] = {}
        self._buffers: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._gone: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._open = True
        threading.Thread(target=self._serve, name="hvdplus-hub", daemon=True).start()

    @property
    def offer(self) -> dict[str, Any]:
        """What the other ranks need to connect."""
        return {
            "host": socket.gethostname(),
            "addresses": _addresses(),
            "port": self._server.getsockname()[1],
            "token": self._token,
        }

    def _serve(self) -> None:
        while self._open:
            for key, _ in self._selector.select(timeout=0.2):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._server:
                    peer, _ = sock.accept()
                    self._buffers[peer] = b""
                    self._selector.register(peer, selectors.EVENT_READ)
                else:
                    self._read(sock)

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(sock)
            return
        *lines, self._buffers[sock] = (self._buffers[sock] + data).split(b"\n")
        for line in lines:
            try:
                self._route(sock, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                self._drop(sock)  # a stranger; a rank never sends such a line
                return

    def _route(self, sock: socket.socket, message: dict[str, Any]) -> None:
        if "hello" in message:
            if secrets.compare_digest(str(message["hello"]), self._token):
                self._ranks[sock] = message["rank"]
                self._peers[message["rank"]] = sock
                self._post(sock, {"welcome": self._token})
            return
        rank = self._ranks[sock]
        if "left" in message or "failed" in message:
            self._gone.add(rank)
        if "to" in message:
            self._post(self._peers[message["to"]], message)
        else:
            self._tell_all(message, but=rank)

    def _tell_all(self, message: dict[str, Any], but: int) -> None:
        for rank, sock in list(self._peers.items()):
            if rank != but:
                self._post(sock, message)

    def _post(self, sock: socket.socket, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(json.dumps(message).encode() + b"\n")

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()
        rank = self._ranks.pop(sock, None)
        if rank is None:
            return
        del self._peers[rank]
        if rank not in self._gone and self._open:
            self._gone.add(rank)
            self._tell_all({"died": rank}, but=rank)

    def close(self, grace: float) -> None:
        """Stop, after ``grace`` seconds in which messages still pass."""
        time.sleep(grace)
        self._open = False
        self._server.close()


def _addresses() -> list[str]:
    """Return the IPv4 addresses of this host's interfaces, loopback left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                found.append(socket.inet_ntoa(array.array("B", reply)[20:24].tobytes()))
    return [address for address in found if not address.startswith("127.")]


_LIBRARIES = ("site-packages", f"{os.sep}lib{os.sep}python", f"{os.sep}hvdplus{os.sep}", f"{os.sep}hvdplus_")


def _main_thread_line() -> str:
    """Return the innermost line of the main thread that is not library code, as ``file:line function``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame) if frame else []
    own = [f for f in frames if not any(place in f.filename for place in _LIBRARIES)]
    return _short((own or frames)[-1]) if frames else "an unknown place"


def _short(frame: traceback.FrameSummary) -> str:
    return f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}"
