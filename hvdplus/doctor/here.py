"""The machine at hand: looks each fact up once, without importing a framework."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import platform
import resource
import socket
import struct
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from hvdplus.build.found import Probe, TensorFlow, Torch
from hvdplus.build.probe import (
    TENSORFLOW_DISTRIBUTIONS,
    find_machine,
    find_tensorflow,
    find_torch,
    installed_packages,
    package_directory,
    read,
)
from hvdplus.build.recipe import framework_parts
from hvdplus.build.record import Record, read_record
from hvdplus.doctor.machine import Interface, Script
from hvdplus.launch.look import look
from hvdplus.launch.site import Site

PACKAGES = ("hvdplus", "torch", *TENSORFLOW_DISTRIBUTIONS, "keras", "tf_keras", "horovod", "mpi4py", "numba", "numpy")
_SIOCGIFADDR = 0x8915


class Here:
    """The facts of this machine, and the script that was named to the command."""

    def __init__(self, script: Path | None = None) -> None:
        self._script = script

    @cached_property
    def site(self) -> Site:
        """Look for launchers."""
        return look()

    @cached_property
    def python(self) -> str:
        """Ask the interpreter."""
        return platform.python_version()

    @cached_property
    def packages(self) -> Mapping[str, str]:
        """Read the installed packages' metadata."""
        return installed_packages(PACKAGES)

    @cached_property
    def torch(self) -> Torch | None:
        """Read PyTorch's version file."""
        return find_torch()

    @cached_property
    def tensorflow(self) -> TensorFlow | None:
        """Read TensorFlow's metadata."""
        return find_tensorflow()

    @cached_property
    def record(self) -> Record | None:
        """Read what `hvdplus install-horovod` wrote."""
        return read_record()

    @cached_property
    def built_for(self) -> Mapping[str, str]:
        """Read what Horovod's own build wrote."""
        home = package_directory("horovod")
        text = read(home / "metadata.json") if home else ""
        return {name: str(version) for name, version in json.loads(text).items()} if text else {}

    @cached_property
    def current(self) -> tuple[str, ...]:
        """Name what is installed in the words of a build's key."""
        found = Probe(machine=find_machine(), torch=self.torch, tensorflow=self.tensorflow)
        return (found.machine.python, *framework_parts(found))

    @cached_property
    def addresses(self) -> tuple[str, ...]:
        """Ask the resolver, as Gloo does."""
        try:
            answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        except socket.gaierror:
            return ()
        return tuple(sorted({str(answer[4][0]) for answer in answers}))

    @cached_property
    def interfaces(self) -> tuple[Interface, ...]:
        """Ask the kernel for every interface's address."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = [(name, _address(probe, name)) for _, name in socket.if_nameindex()]
        return tuple(Interface(name, address) for name, address in found if address)

    @cached_property
    def routed(self) -> str | None:
        """Read the kernel's routing table."""
        return parse_routes(read(Path("/proc/net/route")))

    @cached_property
    def shm_bytes(self) -> int | None:
        """Ask the file system."""
        try:
            status = os.statvfs("/dev/shm")
        except OSError:
            return None
        return status.f_frsize * status.f_blocks

    @cached_property
    def memlock_bytes(self) -> int | None:
        """Ask for the limit that ranks started here inherit."""
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    @cached_property
    def infiniband(self) -> tuple[str, ...]:
        """List the kernel's devices."""
        return tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*")))

    @cached_property
    def gpus(self) -> int:
        """Count what NVIDIA's driver shows; asking nvidia-smi can take seconds."""
        listed = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        return listed or len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])

    @cached_property
    def script(self) -> Script | None:
        """Read the script, and the modules beside it that it imports."""
        if self._script is None:
            return None
        text = self._script.read_text(errors="replace")
        return Script(self._script.name, text, _modules(self._script, text))


def _address(probe: socket.socket, name: str) -> str | None:
    try:
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(reply[20:24])


def parse_routes(table: str) -> str | None:
    r"""Return the interface of the default route with the least metric.

    >>> parse_routes("Iface Destination Gateway Flags RefCnt Use Metric Mask\neth0 00000000 0102 3 0 0 0 00000000")
    'eth0'
    """
    rows = [line.split() for line in table.splitlines()[1:]]
    default = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return min(default)[1] if default else None


def _modules(script: Path, text: str) -> dict[str, str]:
    """Read the files beside a script that it imports by name; what they import in turn is not followed."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    files = {f"{name.split('.')[0]}.py" for name in names}
    return {name: read(script.parent / name) for name in sorted(files) if (script.parent / name).is_file()}
