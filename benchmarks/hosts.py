"""Several hosts on one machine: Linux network namespaces behind a switch, every link as fast as you say.

    with Hosts(2, gbit=1.0) as hosts:
        hosts.run(hosts[0], hosts.mpirun(["python", "train.py"]), timeout=60)

Each host has an interface `eth0` and an address of its own, its own `/etc/hosts` and its own host name, so that
launchers and collectives see what they see on real machines. What hosts share is the file system, the memory and the
cores: this is for correctness, for failures of a link, and for comparing ways to use the same link, side by side in one
run.

Needs Linux, root, and `ip` and `tc` (Debian and Ubuntu: `apt install iproute2`) and `unshare` (`util-linux`);
`supported()` says what is missing. It needs no `sshd`: `Hosts` writes a small program `ssh` that starts a command on
one of its hosts, which is all that `mpirun` and `horovodrun` want from it.
"""

from __future__ import annotations

import functools
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, TypeAlias

Output: TypeAlias = int | IO[Any] | None

INTERFACE = "eth0"
NAMES = ("boxa", "boxb", "boxc", "boxd")
NETWORK = "10.77.0"
CIDR = f"{NETWORK}.0/24"
BIN = Path(sys.executable).parent
NETNS_ETC = Path("/etc/netns")
NETNS_RUN = Path("/run/netns")
PREFIX = "hvp"  # what the names of our namespaces begin with; the process id follows
GRACE_SECONDS = 3.0
QUEUE_SECONDS = 0.02  # what a link's queue holds before it drops
PORT = 29500

ENTER = 'echo "$1" > /proc/sys/kernel/hostname && shift && exec "$@"'
"""Shell text that gives a new UTS namespace its host name and becomes the command that follows it."""

SSH = """#!/bin/sh
# `ssh [options] host [options] command...` for the hosts of one run: starts the command in the host's namespaces.
# Unlike a real ssh it hands on the caller's environment.
host=
while [ $# -gt 0 ]; do
  case $1 in
    -[bcDEeFIiJLlmOopQRSWw]) shift 2 ;;
    -*) shift ;;
    *) [ -z "$host" ] || break; host=${1##*@}; shift ;;
  esac
done
case $host in
%s
  *) echo "ssh: no host is called $host" >&2; exit 255 ;;
esac
"""

_count = itertools.count(1)


class HostsError(RuntimeError):
    """The machine refused a command that sets up hosts; the message has the command and what it said."""


@dataclass(frozen=True)
class Host:
    """One host: its name, which is what `hostname` says on it, its address, and the network namespace it is.

    Without a namespace it is the machine itself.
    """

    name: str
    address: str
    namespace: str

    def enter(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` on this host, started from anywhere on the machine."""
        if not self.namespace:
            return list(argv)
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", ENTER, "sh", self.name, *argv]


@functools.cache
def supported() -> str | None:
    """Say why hosts cannot be made here, or return None if they can; makes two for a moment to find out."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces exist on Linux only, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            return f"there is no `{program}` on PATH (Debian and Ubuntu: apt install {package})"
    try:
        with Hosts(2, gbit=1.0) as hosts:
            hosts.run(hosts[0], ["true"], timeout=20).check_returncode()
    except (OSError, HostsError, subprocess.SubprocessError) as error:
        return f"the kernel refuses: {error}"
    return None


class Hosts:
    """Two to four hosts, there as long as the context is open; whatever runs on them is ended with it.

    Args:
        count: how many hosts.
        gbit: rate of every link in Gbit/s, in both directions; None leaves links as fast as the machine copies.

    Attributes:
        folder: a directory for the run's files, gone with the hosts; it holds `ssh` and each host's TMPDIR.
        interface: the network interface that every host has.
        sharing: how many hosts' bytes the kernel counts at one such interface.
    """

    interface = INTERFACE
    cidr = CIDR
    sharing = 1

    def __init__(self, count: int = 2, gbit: float | None = None) -> None:
        if not 2 <= count <= len(NAMES):
            raise ValueError(f"count is {count}; {2} to {len(NAMES)} hosts can be made")
        run = f"{PREFIX}{os.getpid()}x{next(_count)}"
        self._run = run
        self._switch = f"{run}s"
        self.hosts = tuple(
            Host(name, f"{NETWORK}.{number}", f"{run}{name[-1]}") for number, name in enumerate(NAMES[:count], start=1)
        )
        self.gbit = gbit
        self.folder = Path()
        self._children: list[subprocess.Popen[Any]] = []
        self._old_handler: Any = None

    def __len__(self) -> int:
        return len(self.hosts)

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def __enter__(self) -> Hosts:
        """Make the hosts.

        Raises:
            HostsError: the machine refuses; what was made until then is gone again.
        """
        self._catch_terminate()
        try:
            sweep()
            self.folder = Path(tempfile.mkdtemp(prefix=f"{self._run}-"))
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """End what runs on the hosts and remove them."""
        self._remove()

    # -- what runs on them

    def popen(
        self,
        host: Host,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdout: Output = None,
        stderr: Output = None,
    ) -> subprocess.Popen[str]:
        """Start a program on a host, in a session of its own, with text pipes.

        Args:
            host: where.
            argv: the command line; a relative program is looked up on PATH, this Python's programs first.
            env: what is added to `environment()`.
            stdout: as in `subprocess.Popen`.
            stderr: as in `subprocess.Popen`.
        """
        child = subprocess.Popen(
            host.enter(argv),
            env={**self.environment(host), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._children.append(child)
        return child

    def run(
        self, host: Host, argv: Sequence[str], env: Mapping[str, str] | None = None, *, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a host to its end; its output and errors come back together in `stdout`.

        Raises:
            subprocess.TimeoutExpired: `timeout` seconds were not enough; everything on all hosts was ended.
        """
        child = self.popen(host, argv, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            self.end_all()
            output, _ = child.communicate()
            raise subprocess.TimeoutExpired(list(argv), timeout, output) from late
        return subprocess.CompletedProcess(list(argv), child.returncode, output)

    def end_all(self) -> None:
        """End every process on the hosts, whoever started it; those that do not end by themselves are killed."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + GRACE_SECONDS
            while self._pids() and time.monotonic() < deadline:
                time.sleep(0.02)

    def environment(self, host: Host) -> dict[str, str]:
        """Return what programs on a host get: this process' environment, and what makes launchers use the links."""
        return {
            **os.environ,
            "PATH": os.pathsep.join([str(self.folder), str(BIN), os.environ.get("PATH", os.defpath)]),
            "TMPDIR": str(self.folder / host.name),
            "GLOO_SOCKET_IFNAME": self.interface,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_btl_tcp_if_include": self.cidr,
            "OMPI_MCA_btl": "tcp,self",
            "OMPI_MCA_pml": "ob1",
            **self._daemons(),
        }

    def _daemons(self) -> dict[str, str]:
        """Return whom Open MPI 4 and 5, in turn, ask for a daemon on a host, and which network that may use."""
        agent = str(self.folder / "ssh")
        return {
            "OMPI_MCA_plm_rsh_agent": agent,
            "PRTE_MCA_plm_ssh_agent": agent,
            "OMPI_MCA_oob_tcp_if_include": self.cidr,
            "PRTE_MCA_prte_if_include": self.interface,
        }

    # -- launchers; each line is to be run on the first host

    def mpirun(self, argv: Sequence[str], *, slots: int = 1, forward: Sequence[str] = ()) -> list[str]:
        """Return an `mpirun` line with `slots` ranks on every host; `forward` names variables that ranks shall have."""
        names = [part for name in forward for part in ("-x", name)]
        ranks = str(slots * len(self))
        where = ["--host", self._where(slots)]
        return ["mpirun", "-np", ranks, *where, "--bind-to", "none", "--map-by", "slot", *names, *argv]

    def horovodrun(self, argv: Sequence[str], *, slots: int = 1, controller: str = "gloo") -> list[str]:
        """Return a `horovodrun` line with `slots` ranks on every host; `controller` is `gloo` or `mpi`."""
        binding = ["--binding-args=--bind-to none --map-by slot"] if controller == "mpi" else []
        line = ["horovodrun", f"--{controller}", "--network-interfaces", self.interface, *binding]
        return [*line, "-np", str(slots * len(self)), "-H", self._where(slots), *argv]

    def torch_environment(self, rank: int, *, slots: int = 1, port: int = PORT) -> dict[str, str]:
        """Return what `torchrun` would set for a rank, with `slots` ranks on every host."""
        return {
            "MASTER_ADDR": self[0].address,
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(slots * len(self)),
            "LOCAL_RANK": str(rank % slots),
            "LOCAL_WORLD_SIZE": str(slots),
            "GROUP_RANK": str(rank // slots),
        }

    def start_ranks(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        slots: int = 1,
        port: int = PORT,
        stdout: Output = None,
        stderr: Output = None,
    ) -> list[subprocess.Popen[str]]:
        """Start one process for every rank, without a launcher, with `torchrun`'s variables."""
        return [
            self.popen(
                self[rank // slots],
                argv,
                {**self.torch_environment(rank, slots=slots, port=port), **(env or {})},
                stdout=stdout,
                stderr=stderr,
            )
            for rank in range(slots * len(self))
        ]

    def _where(self, slots: int) -> str:
        return ",".join(f"{host.name}:{slots}" for host in self)

    # -- links

    def set_link(self, host: Host, up: bool) -> None:
        """Pull a host's cable out, or put it back; connections live on if it is back before they give up."""
        _command("ip", "-n", self._switch, "link", "set", _port(host), "up" if up else "down")
        if up:  # whoever asked for an address meanwhile has given up on it for a second
            for other in self:
                _command("ip", "-n", other.namespace, "neighbour", "flush", "dev", INTERFACE, "nud", "all")

    def shape(self, gbit: float | None) -> None:
        """Give every link a rate in Gbit/s in both directions; None takes the limit away."""
        self.gbit = gbit
        for host in self:
            _shape(host.namespace, INTERFACE, gbit)
            _shape(self._switch, _port(host), gbit)

    # -- making and removing

    def _make(self) -> None:
        _command("ip", "netns", "add", self._switch)
        _command("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _command("ip", "-n", self._switch, "link", "set", "switch", "up")
        for host in self:
            self._make_host(host)
        self.shape(self.gbit)
        self._write_ssh()

    def _make_host(self, host: Host) -> None:
        """Make a namespace with one interface, whose other end is a port of the switch."""
        self._write_etc(host)
        inside = ("ip", "-n", host.namespace)
        _command("ip", "netns", "add", host.namespace)
        # Without this, programs that ask for the interface's address may get a link-local IPv6 one.
        _command(*host.enter(["sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6 || true"]))
        port = ("peer", "name", _port(host), "netns", self._switch)
        _command(*inside, "link", "add", INTERFACE, "type", "veth", *port)
        _command("ip", "-n", self._switch, "link", "set", _port(host), "master", "switch", "up")
        _command(*inside, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        for name in ("lo", INTERFACE):
            _command(*inside, "link", "set", name, "up")

    def _write_etc(self, host: Host) -> None:
        """Write the files that `ip netns exec` puts over those in /etc."""
        folder = NETNS_ETC / host.namespace
        folder.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *(f"{other.address} {other.name}" for other in self)]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        if Path("/etc/resolv.conf").exists():
            (folder / "resolv.conf").write_text("# no name server can be reached from here\n")
        (self.folder / host.name).mkdir()

    def _write_ssh(self) -> None:
        path = self.folder / "ssh"
        path.write_text(SSH % "\n".join(self._ssh_case(host) for host in self))
        path.chmod(0o755)

    def _ssh_case(self, host: Host) -> str:
        """Return the line of `ssh` that goes to a host; as ssh does, it joins its arguments for the shell there."""
        enter = shlex.join(host.enter(["sh", "-c"]))
        return f'  {host.name}) TMPDIR={shlex.quote(str(self.folder / host.name))} exec {enter} "$*" ;;'

    def _remove(self) -> None:
        """End what runs, remove namespaces and files; signals wait until that is done."""
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.end_all()
            self._unmake()
            if self.folder != Path():
                shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            if self._old_handler is not None:
                signal.signal(signal.SIGTERM, self._old_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _unmake(self) -> None:
        for namespace in (self._switch, *(host.namespace for host in self)):
            _remove_namespace(namespace)

    def _catch_terminate(self) -> None:
        """Make SIGTERM an exception, so that the context is left in order."""
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, _terminated)

    def _pids(self) -> set[int]:
        """Return what runs on the hosts, and what we started that has not got there yet."""
        own = {child.pid for child in self._children if child.poll() is None}
        return own.union(*(map(int, _ask("ip", "netns", "pids", host.namespace).split()) for host in self))


class Loopback(Hosts):
    """The machine itself in the place of hosts, where those cannot be made: everything goes over `lo`, unlimited."""

    interface = "lo"
    cidr = "127.0.0.0/8"

    def __init__(self, count: int = 2) -> None:
        super().__init__(count)
        self.hosts = (Host("localhost", "127.0.0.1", ""),) * count
        self.sharing = count

    def shape(self, gbit: float | None) -> None:
        """Refuse a rate.

        Raises:
            HostsError: one was given.
        """
        if gbit is not None:
            raise HostsError(f"gbit is {gbit:g}; the loopback interface is not limited, make hosts or leave it None")

    def set_link(self, host: Host, up: bool) -> None:
        """Refuse.

        Raises:
            HostsError: always.
        """
        raise HostsError("the machine's loopback interface is not ours to take up or down; make hosts")

    def _make(self) -> None:
        (self.folder / "localhost").mkdir()

    def _unmake(self) -> None:
        pass

    def _daemons(self) -> dict[str, str]:
        return {}

    def _where(self, slots: int) -> str:
        return f"localhost:{slots * len(self)}"

    def _pids(self) -> set[int]:
        return {child.pid for child in self._children if child.poll() is None}


def sweep() -> None:
    """Remove the hosts of runs that were killed before they could do it themselves."""
    for folder in (NETNS_RUN, NETNS_ETC, Path(tempfile.gettempdir())):
        for path in folder.glob(f"{PREFIX}*x*"):
            owner = path.name.removeprefix(PREFIX).partition("x")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                _sweep(folder, path)


def _sweep(folder: Path, path: Path) -> None:
    if folder != NETNS_RUN:
        shutil.rmtree(path, ignore_errors=True)
        return
    for pid in _ask("ip", "netns", "pids", path.name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _remove_namespace(path.name)


def _terminated(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _port(host: Host) -> str:
    return f"to-{host.name}"


def _shape(namespace: str, interface: str, gbit: float | None) -> None:
    """Limit what leaves an interface with a token bucket (tc-tbf(8))."""
    tc = ("tc", "-n", namespace, "qdisc")
    if gbit is None:
        with suppress(HostsError):  # there is none to delete
            _command(*tc, "delete", "dev", interface, "root")
        return
    bits = round(gbit * 1e9)
    burst = max(256 * 1024, bits // 8 // 1000)  # at least what a millisecond brings, or fast links starve
    limit = burst + round(bits / 8 * QUEUE_SECONDS)
    settings = ("rate", f"{bits}bit", "burst", f"{burst}", "limit", f"{limit}")
    _command(*tc, "replace", "dev", interface, "root", "tbf", *settings)


def _remove_namespace(name: str) -> None:
    """Remove a namespace, and with it its interfaces and the other ends of them, and its files in /etc."""
    _ask("ip", "netns", "delete", name)
    shutil.rmtree(NETNS_ETC / name, ignore_errors=True)
    with suppress(OSError):  # someone else's are still there
        NETNS_ETC.rmdir()


def _command(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise HostsError(f"`{shlex.join(argv)}` failed: {done.stderr.strip() or done.returncode}")


def _ask(*argv: str) -> str:
    """Return what a command prints; nothing if it fails."""
    return subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL).stdout
