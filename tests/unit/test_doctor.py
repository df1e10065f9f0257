"""Tests of `hvdplus doctor`: a healthy machine of plain facts, one planted fault at a time; two ranks measured."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hvdplus.build.found import TensorFlow, Torch
from hvdplus.build.process import Finished
from hvdplus.build.record import Record
from hvdplus.cli import app
from hvdplus.cli import doctor as command
from hvdplus.doctor import link as linking
from hvdplus.doctor import pingpong
from hvdplus.doctor.examine import CHECKS, examine, is_fine
from hvdplus.doctor.finding import Check, Finding, ok
from hvdplus.doctor.here import Here, parse_routes
from hvdplus.doctor.link import judge, measure_link
from hvdplus.doctor.machine import Interface, Script
from hvdplus.doctor.pingpong import MARK, Row, TcpWire, echo, measure
from hvdplus.doctor.script import imports_of_wrapper
from hvdplus.errors import LaunchError
from hvdplus.launch.hosts import parse_hosts
from hvdplus.launch.site import Allocation, Horovod, Mpi, Site

README = (Path(__file__).parents[2] / "README.md").read_text()
KEY = "horovod-0.28.1_cp311_torch-2.13.0+cpu_tensorflow-cpu-2.21.0_openmpi-4.1.4_gcc-12_glibc2.36_x86_64+avx"
RECORD = Record(KEY, ("torch over gloo", "torch over mpi"))
TORCH, TENSORFLOW = Torch("2.13.0+cpu"), TensorFlow("2.21.0", "tensorflow-cpu")
OPENMPI4 = Mpi("openmpi", "4.1.4", "mpirun", "/usr/bin/mpirun")
OPENMPI5 = Mpi("openmpi", "5.0.11", "mpirun", "/env/bin/mpirun")
MPICH = Mpi("mpich", "4.2", "mpiexec", "/usr/bin/mpiexec")
SITE = Site(
    mpi=OPENMPI4, horovodrun="/env/bin/horovodrun", horovod=Horovod(True, "openmpi"), mpi4py=True, cores=8, host="boxa"
)
PACKAGES = {"hvdplus": "1", "torch": "2.13.0", "keras": "3.15.1", "horovod": "0.28.1", "mpi4py": "4.1", "numba": "0.6"}
LOOPBACK, ETHERNET, DOCKER = (
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "10.0.0.2"),
    Interface("docker0", "172.17.0.1"),
)


@dataclass(frozen=True)
class Facts:
    """A machine of plain values; as it stands it is healthy."""

    site: Site = SITE
    python: str = "3.11.7"
    packages: Mapping[str, str] = field(default_factory=lambda: PACKAGES)
    torch: Torch | None = TORCH
    tensorflow: TensorFlow | None = TENSORFLOW
    record: Record | None = RECORD
    built_for: Mapping[str, str] = field(default_factory=dict)
    current: tuple[str, ...] = ("cp311", "torch-2.13.0+cpu", "tensorflow-cpu-2.21.0")
    addresses: tuple[str, ...] = ("10.0.0.2",)
    interfaces: tuple[Interface, ...] = (LOOPBACK, ETHERNET)
    routed: str | None = "eth0"
    shm_bytes: int | None = 16 * 2**30
    memlock_bytes: int | None = 8 * 2**20
    infiniband: tuple[str, ...] = ()
    gpus: int = 0
    script: Script | None = None


HEALTHY = Facts()


def planted(**faults: object) -> Facts:
    """Return the healthy machine with some facts changed; ``environ`` and other fields of the site directly."""
    names = {each.name for each in dataclasses.fields(Site)}
    of_site = {name: value for name, value in faults.items() if name in names}
    rest = {name: value for name, value in faults.items() if name not in names}
    return dataclasses.replace(HEALTHY, site=dataclasses.replace(SITE, **of_site), **rest)  # type: ignore[arg-type]


def without(*names: str) -> dict[str, str]:
    """Return the packages without some."""
    return {name: version for name, version in PACKAGES.items() if name not in names}


def findings(machine: Facts) -> dict[str, Finding]:
    """Return the findings by the name of their check."""
    return {finding.check: finding for finding in examine(machine)}


def test_a_healthy_machine() -> None:
    found = examine(HEALTHY)
    assert [(finding.check, finding.what) for finding in found if finding.status != "ok"] == []
    assert is_fine(found)
    shown = "frameworks, Horovod, MPI, launcher, start, host name, network, shared memory, Keras, numba"
    assert ", ".join(finding.check for finding in found) == shown


GPU = {"torch": Torch("2.13.0+cu130", cuda="13.0"), "current": ("cp311", "torch-2.13.0+cu130"), "gpus": 4}
GPU_RECORD = Record("horovod-0.28.1_cp311_torch-2.13.0+cu130_openmpi-4.1.4_nccl-2.28", ("torch over mpi",))
GPU |= {"record": GPU_RECORD, "tensorflow": None}
WITH_NCCL = {"horovod": Horovod(True, "openmpi", nccl=True)}
RANK = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
KERAS_IMPORT = "import os\nimport horovod.tensorflow.keras as hvd\n"
# What is planted; the check that must see it, how it must call it, and words of what it says or of its fix.
FAULTS: dict[str, tuple[dict[str, object], str, str, tuple[str, ...]]] = {
    "no framework": ({"torch": None, "tensorflow": None}, "frameworks", "bad", ("neither PyTorch nor", "pip install")),
    "only TensorFlow": (
        {"torch": None, "current": ("cp311", "tensorflow-cpu-2.21.0")},
        "Horovod",
        "bad",
        ("built for other versions: torch-2.13.0+cpu -> nothing", "hvdplus install-horovod"),
    ),
    "no Horovod": (
        {"horovod": None, "packages": without("horovod")},
        "Horovod",
        "warn",
        ("ranks exchange over mpi4py", "hvdplus install-horovod"),
    ),
    "nothing to exchange with": (
        {"horovod": None, "mpi4py": False, "packages": without("horovod", "mpi4py")},
        "Horovod",
        "bad",
        ("neither Horovod nor mpi4py",),
    ),
    "Horovod of an older torch": (
        {"current": ("cp311", "torch-2.14.0+cpu", "tensorflow-cpu-2.21.0")},
        "Horovod",
        "bad",
        ("torch-2.13.0+cpu -> torch-2.14.0+cpu", "hvdplus install-horovod"),
    ),
    "Horovod before TensorFlow came": (
        {"record": Record("horovod-0.28.1_cp311_torch-2.13.0+cpu_gloo-only", ("x",))},
        "Horovod",
        "bad",
        ("nothing -> tensorflow-cpu-2.21.0",),
    ),
    "Horovod that nobody checked": ({"record": Record(KEY)}, "Horovod", "warn", ("not checked yet",)),
    "Horovod of unknown origin": (
        {"record": None, "built_for": {"pytorch": "2.13.0+cpu", "dummy": "none"}},
        "Horovod",
        "warn",
        ("for pytorch 2.13.0+cpu, over Gloo and MPI (openmpi)", "built by something else"),
    ),
    "Horovod of unknown origin for other versions": (
        {"record": None, "built_for": {"pytorch": "2.1.0", "tensorflow": "2.21.0"}},
        "Horovod",
        "bad",
        ("pytorch 2.1.0 -> 2.13.0+cpu",),
    ),
    "another MPI": ({"mpi": MPICH}, "MPI", "bad", ("mpich 4.2 (/usr/bin/mpiexec)", "built with openmpi", "alone")),
    "another version of MPI": ({"mpi": OPENMPI5}, "MPI", "warn", ("openmpi 5.0.11", "built with openmpi 4.1.4")),
    "no mpirun": ({"mpi": None}, "MPI", "warn", ("no mpirun is on PATH, but Horovod was built with openmpi",)),
    "Open MPI 5": ({"mpi": OPENMPI5}, "horovodrun", "warn", ("plain horovodrun fails", "--binding-args=")),
    "a rank without a size": (
        {"environ": {"PMI_RANK": "1"}},
        "launcher",
        "bad",
        ("PMI_RANK=1", "PMI_SIZE does not say", "unset"),
    ),
    "a rank that no engine serves": (
        {"environ": {"RANK": "1", "WORLD_SIZE": "2"}},
        "launcher",
        "bad",
        ("torch-env started this as rank 1 of 2", "no engine here can serve it"),
    ),
    "a rank of MPI and Horovod without": (
        {"environ": RANK, "horovod": Horovod(True, ""), "mpi4py": False},
        "launcher",
        "bad",
        ("openmpi started this as rank 1 of 8",),
    ),
    "nothing starts ranks": (
        {"mpi": None, "horovod": Horovod(False, ""), "mpi4py": False},
        "start",
        "bad",
        ("nothing here can start ranks",),
    ),
    "one core": ({"cores": 1}, "start", "warn", ("uses mpirun, but 2 ranks share one core",)),
    "root": ({"root": True}, "root", "warn", ("mpirun of Open MPI refuses", "OMPI_ALLOW_RUN_AS_ROOT=1")),
    "container": ({"container": True}, "container", "warn", ("Read -1", "btl_vader_single_copy_mechanism=none")),
    "no such engine": ({"environ": {"HVDPLUS_ENGINE": "nccl"}}, "settings", "bad", ("HVDPLUS_ENGINE='nccl'",)),
    "no such codec": ({"environ": {"HVDPLUS_STRATEGY": "fp17"}}, "settings", "bad", ("fp17",)),
    "engine without its package": (
        {"environ": {"HVDPLUS_ENGINE": "mpi"}, "mpi4py": False},
        "settings",
        "bad",
        ("HVDPLUS_ENGINE=mpi, but mpi4py is not installed",),
    ),
    "engine without Horovod": (
        {"environ": {"HVDPLUS_ENGINE": "horovod"}, "horovod": None},
        "settings",
        "bad",
        ("HVDPLUS_ENGINE=horovod, but Horovod is not installed",),
    ),
    "host name on loopback": (
        {"addresses": ("127.0.1.1",)},
        "host name",
        "warn",
        ("boxa resolves to 127.0.1.1", "Connection refused", "/etc/hosts"),
    ),
    "host name on both loopbacks": ({"addresses": ("127.0.0.1", "::1")}, "host name", "warn", ("127.0.0.1, ::1",)),
    "host name without an address": ({"addresses": ()}, "host name", "bad", ("boxa does not resolve",)),
    "several interfaces": (
        {"interfaces": (LOOPBACK, DOCKER, ETHERNET)},
        "network",
        "warn",
        ("docker0 172.17.0.1, eth0 10.0.0.2; eth0 is routed", "--network-interfaces eth0"),
    ),
    "no network": (
        {"interfaces": (LOOPBACK,), "routed": None},
        "network",
        "warn",
        ("no network interface but loopback",),
    ),
    "a variable that names no interface": (
        {"environ": {"NCCL_SOCKET_IFNAME": "=eth"}},
        "network",
        "bad",
        ("NCCL_SOCKET_IFNAME==eth names no interface", "there are lo, eth0"),
    ),
    "small shared memory": ({"shm_bytes": 64 * 2**20}, "shared memory", "warn", ("64 MiB", "--shm-size")),
    "no shared memory": ({"shm_bytes": None}, "shared memory", "bad", ("there is no /dev/shm",)),
    "limited InfiniBand": (
        {"infiniband": ("mlx5_0",), "memlock_bytes": 64 * 2**10},
        "locked memory",
        "warn",
        ("ulimit -l is 64 KiB", "mlx5_0", "memlock=-1"),
    ),
    "GPUs and a torch for the CPU": ({"gpus": 1}, "GPUs", "warn", ("1 GPU, but PyTorch is built for the CPU",)),
    "no GPU for a torch with CUDA": (GPU | {"gpus": 0}, "GPUs", "warn", ("built for CUDA 13.0, but no GPU",)),
    "Horovod without NCCL": (GPU, "GPUs", "warn", ("4 GPUs", "without NCCL", "--with-nccl")),
    "hidden GPUs": (GPU | WITH_NCCL | {"environ": {"CUDA_VISIBLE_DEVICES": ""}}, "GPUs", "warn", ("hidden by",)),
    "more ranks than GPUs": (
        GPU | WITH_NCCL | {"environ": RANK},
        "GPUs",
        "warn",
        ("8 ranks on this host share 4 GPUs", "start 4 ranks a host"),
    ),
    "Horovod's own Keras wrapper": (
        {"script": Script("train.py", KERAS_IMPORT)},
        "Keras",
        "bad",
        (
            "train.py:2 imports horovod.tensorflow.keras: under Keras 3.15.1",
            "without exchanging",
            "import hvdplus.keras",
        ),
    ),
    "the wrapper in a module beside the script": (
        {"script": Script("train.py", "import helpers\n", {"helpers.py": "from horovod import keras\n"})},
        "Keras",
        "bad",
        ("helpers.py:1 imports horovod.keras",),
    ),
    "a script that is no Python": (
        {"script": Script("train.py", "if:\n")},
        "Keras",
        "bad",
        ("train.py:1 is no Python",),
    ),
    "no numba": ({"packages": without("numba")}, "numba", "warn", ("numba is not installed", "pip install numba")),
}


@pytest.mark.parametrize(("faults", "check", "status", "words"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault(faults: dict[str, object], check: str, status: str, words: tuple[str, ...]) -> None:
    finding = findings(planted(**faults))[check]
    assert finding.status == status
    assert finding.fix
    for word in words:
        assert word in f"{finding.what} {finding.fix}"


RIGHT: dict[str, tuple[dict[str, object], str, str]] = {
    "a rank": ({"environ": RANK}, "launcher", "openmpi started this as rank 1 of 8"),
    "a job's shell": (
        {"allocation": Allocation("slurm", parse_hosts("n1:2")), "environ": {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}},
        "launcher",
        "no launcher started this: a shell in an allocation of slurm",
    ),
    "the only rank": ({"environ": {"PMI_RANK": "0", "PMI_SIZE": "1"}, "mpi4py": False}, "launcher", "rank 0 of 1"),
    "root that is allowed": (
        {"root": True, "environ": {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}},
        "root",
        "told to allow it",
    ),
    "container with the remedy": (
        {"container": True, "environ": {"OMPI_MCA_btl_vader_single_copy_mechanism": "none"}},
        "container",
        "mechanism=none",
    ),
    "Gloo alone": ({"mpi": None, "horovod": Horovod(True, "")}, "MPI", "ranks start with horovodrun over Gloo"),
    "a sister MPI": (
        {"mpi": MPICH, "horovod": Horovod(True, "intelmpi"), "record": None},
        "MPI",
        "mpich 4.2",
    ),
    "settings": (
        {"environ": {"HVDPLUS_STRATEGY": "fp16", "HVDPLUS_ENGINE": "mpi"}},
        "settings",
        "HVDPLUS_STRATEGY=fp16",
    ),
    "several interfaces, one named": (
        {"interfaces": (LOOPBACK, DOCKER, ETHERNET), "environ": {"NCCL_SOCKET_IFNAME": "eth"}},
        "network",
        "eth0 is routed",
    ),
    "interfaces to leave out": ({"environ": {"NCCL_SOCKET_IFNAME": "^docker0"}}, "network", "eth0 10.0.0.2"),
    "an interface of a list": ({"environ": {"HOROVOD_GLOO_IFACE": "ib0,eth0"}}, "network", "eth0 10.0.0.2"),
    "InfiniBand without limit": (
        {"infiniband": ("mlx5_0",), "memlock_bytes": None},
        "locked memory",
        "without limit",
    ),
    "GPUs": (GPU | WITH_NCCL, "GPUs", "4 GPUs, NCCL in Horovod"),
    "a rank that sees one GPU": (
        GPU | WITH_NCCL | {"environ": RANK | {"CUDA_VISIBLE_DEVICES": "2"}},
        "GPUs",
        "4 GPUs",
    ),
    "a script with hvdplus": (
        {"script": Script("train.py", "import hvdplus.keras as hvd\nimport horovod.torch\n")},
        "Keras",
        "train.py does not import Horovod's own Keras wrapper",
    ),
}


@pytest.mark.parametrize(("facts", "check", "words"), RIGHT.values(), ids=RIGHT)
def test_what_is_right_is_called_so(facts: dict[str, object], check: str, words: str) -> None:
    finding = findings(planted(**facts))[check]
    assert (finding.status, finding.fix) == ("ok", "")
    assert words in finding.what


SILENT: dict[str, tuple[dict[str, object], str]] = {
    "root with MPICH": ({"root": True, "mpi": MPICH}, "root"),
    "Open MPI 5 in a container": ({"container": True, "mpi": OPENMPI5}, "container"),
    "MPICH in a container": ({"container": True, "mpi": MPICH}, "container"),
    "Open MPI 5 and Horovod without MPI": ({"mpi": OPENMPI5, "horovod": Horovod(True, "")}, "horovodrun"),
    "inside a rank": ({"environ": RANK}, "start"),
    "Keras 2": ({"packages": PACKAGES | {"keras": "2.15.0"}, "script": Script("t.py", KERAS_IMPORT)}, "Keras"),
    "Keras 2 beside Keras 3": (
        {
            "packages": PACKAGES | {"tf_keras": "2.21.0"},
            "environ": {"TF_USE_LEGACY_KERAS": "1"},
            "script": Script("t.py", KERAS_IMPORT),
        },
        "Keras",
    ),
    "Keras without Horovod": ({"packages": without("horovod")}, "Keras"),
}


@pytest.mark.parametrize(("facts", "check"), SILENT.values(), ids=SILENT)
def test_what_does_not_matter_is_not_mentioned(facts: dict[str, object], check: str) -> None:
    assert check not in findings(planted(**facts))


def test_warnings_are_fine_and_what_is_bad_is_not() -> None:
    assert is_fine(examine(planted(root=True)))
    assert not is_fine(examine(planted(shm_bytes=None)))


class Broken:
    """A machine of which every question fails."""

    def __getattr__(self, name: str) -> object:
        raise OSError(f"no {name} here")


def test_a_check_that_fails_to_run_is_a_finding() -> None:
    found = examine(Broken())  # type: ignore[arg-type]
    assert len(found) == len(CHECKS)
    for finding in found:
        assert finding.status == "warn"
        assert re.match(r"could not be checked: OSError: no \w+ here", finding.what)


class Half:
    """The healthy machine, but for one question that fails."""

    def __getattr__(self, name: str) -> object:
        if name == "interfaces":
            raise RuntimeError("boom")
        return getattr(HEALTHY, name)


def test_one_broken_fact_leaves_the_other_checks_alone() -> None:
    found = findings(Half())  # type: ignore[arg-type]
    assert found["network"].what == "could not be checked: RuntimeError: boom"
    assert [name for name, finding in found.items() if finding.status != "ok"] == ["network"]


# --- the README ---------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """Return what GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def headings(text: str) -> list[str]:
    """Return the anchors of all headings outside code."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [anchor(line.lstrip("#")) for line in plain.splitlines() if line.startswith("#")]


LINKS = {check.link for check in CHECKS} | {linking.LINK}


def test_every_link_leads_to_a_section_of_the_readme() -> None:
    anchors = headings(README)
    for link in LINKS:
        name, _, target = link.partition("#")
        assert (name, anchors.count(target)) == ("README.md", 1), link


def test_every_section_on_troubles_belongs_to_a_check() -> None:
    section = README.split("\n## Troubleshooting\n")[1].split("\n## ")[0]
    assert {f"README.md#{name}" for name in headings(section)} == LINKS


def test_links_inside_the_readme_lead_somewhere() -> None:
    anchors = headings(README)
    inside = re.findall(r"\]\(#([^)]+)\)", README)
    assert inside
    assert set(inside) <= set(anchors)


# --- scripts ------------------------------------------------------------------------------------------------

KERAS = "horovod.tensorflow.keras"
PROGRAMS = {
    "plain": ("import horovod.tensorflow.keras", [(1, KERAS)]),
    "renamed": ("import os, horovod.keras as hvd", [(1, "horovod.keras")]),
    "from the package": ("from horovod import keras", [(1, "horovod.keras")]),
    "from TensorFlow's": ("\nfrom horovod.tensorflow import keras as hvd", [(2, KERAS)]),
    "a name of it": ("from horovod.tensorflow.keras import DistributedOptimizer", [(1, KERAS)]),
    "its callbacks": ("from horovod.keras.callbacks import MetricAverageCallback as M", [(1, "horovod.keras")]),
    "inside a function": ("def f():\n    import horovod.keras", [(2, "horovod.keras")]),
    "by name": ("import importlib\nimportlib.import_module('horovod.tensorflow.keras')", [(2, KERAS)]),
    "the old way": ("__import__('horovod.keras')", [(1, "horovod.keras")]),
    "twice": ("import horovod.keras\nimport horovod.keras as k", [(1, "horovod.keras"), (2, "horovod.keras")]),
    "not Keras": ("import horovod.torch, horovod.tensorflow as hvd\nfrom horovod import torch", []),
    "hvdplus": ("import hvdplus.keras", []),
    "a relative import": ("from .horovod import keras", []),
    "in words only": ("# import horovod.keras\nprint('import horovod.keras')", []),
    "a longer name": ("import horovod.keras_extras", []),
}


@pytest.mark.parametrize(("text", "expected"), PROGRAMS.values(), ids=PROGRAMS)
def test_imports_of_horovods_wrapper(text: str, expected: list[tuple[int, str]]) -> None:
    assert imports_of_wrapper(text) == expected


def test_a_script_brings_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, nets.deep\nfrom losses import focal\nimport horovod.keras\n")
    (tmp_path / "losses.py").write_text("L = 1\n")
    script = Here(tmp_path / "train.py").script
    assert script is not None
    assert script.modules == {"losses.py": "L = 1\n"}
    (tmp_path / "train.py").write_text("if:")
    broken = Here(tmp_path / "train.py").script
    assert broken == Script("train.py", "if:")
    assert Here().script is None


# --- this machine -------------------------------------------------------------------------------------------


def test_the_facts_of_this_machine() -> None:
    here = Here()
    assert here.packages["numpy"]
    assert here.current[0] == f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert Interface("lo", "127.0.0.1") in here.interfaces
    assert here.gpus >= 0
    assert here.memlock_bytes is None or here.memlock_bytes >= 0
    assert here.torch is None or here.torch.version == here.packages["torch"]


ROUTES = """Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask
eth0	00000000	010200C0	0003	0	0	100	00000000
wlan0	00000000	010200C0	0003	0	0	50	00000000
docker0	000011AC	00000000	0001	0	0	0	0000FFFF
"""


def test_the_default_route_with_the_least_metric_counts() -> None:
    assert parse_routes(ROUTES) == "wlan0"
    assert parse_routes(ROUTES.splitlines()[0]) is None
    assert parse_routes("") is None


def test_examining_this_machine_imports_no_framework() -> None:
    code = (
        "import sys; from hvdplus.doctor.examine import examine; from hvdplus.doctor.here import Here;"
        "found = examine(Here()); assert not any('could not be checked' in each.what for each in found), found;"
        "print([m for m in ('torch', 'tensorflow', 'keras', 'horovod', 'mpi4py', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


# --- two ranks ----------------------------------------------------------------------------------------------


class Clock:
    """A clock that only a wire moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Planted:
    """A wire with a latency and a bandwidth each way; what it has carried."""

    clock: Clock
    latency: float = 1e-4
    bandwidth: float = 1e8
    sizes: list[int] = field(default_factory=list)

    def send(self, data: bytes) -> None:
        """Take the way there."""
        self.sizes.append(len(data))
        self.clock.now += self.latency + len(data) / self.bandwidth

    def receive(self) -> bytes:
        """Take the way back."""
        self.clock.now += self.latency + self.sizes[-1] / self.bandwidth
        return b""


def test_latency_and_bandwidth_are_what_the_wire_has() -> None:
    wire = Planted(Clock())
    rows = measure(wire, wire.clock)
    assert [row.size for row in rows] == list(pingpong.SIZES)
    assert rows[0].microseconds == pytest.approx(100.08)
    assert rows[-1].megabytes_a_second == pytest.approx(100, rel=1e-3)
    assert wire.sizes[-1] == 0, "an empty message ends the talk"


def test_a_slow_wire_is_not_kept_busy_for_ever() -> None:
    wire = Planted(Clock(), latency=1.0)
    assert [row.size for row in measure(wire, wire.clock)] == [pingpong.SIZES[0]]
    assert len(wire.sizes) < 10


def test_tcp_carries_messages_of_any_length_and_ends() -> None:
    port = linking._free_port()
    answers: list[bytes] = []

    def first() -> None:
        wire = TcpWire.open(0, "", port)
        for message in (b"x", b"y" * 300_000):
            wire.send(message)
            answers.append(bytes(wire.receive()))
        wire.send(b"")

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    echo(TcpWire.open(1, "127.0.0.1", port))
    thread.join(30)
    assert answers == [b"x", b"y" * 300_000]


ROWS = [
    {"size": 8, "microseconds": 20.0, "megabytes_a_second": 0.4},
    {"size": 2**24, "microseconds": 1.5e5, "megabytes_a_second": 112.0},
]
SAID = f"hello\n[0]<stdout>:{MARK} {json.dumps(ROWS)}\n"


def test_the_table_is_found_in_what_a_launcher_prints() -> None:
    measured = judge(Finished(0, SAID), "boxa:1,boxb:1 by mpirun")
    assert measured.rows == tuple(Row(**row) for row in ROWS)
    assert measured.finding.status == "ok"
    assert measured.finding.what == "two ranks on boxa:1,boxb:1 by mpirun: 20 us, 112 MB/s (0.9 Gbit/s)"


@pytest.mark.parametrize(
    ("finished", "words"),
    [
        (Finished(None, "waiting"), "did not end within 120 s"),
        (Finished(255, "\nssh: connect to host boxb port 22: Connection refused\n"), "port 22: Connection refused"),
        (Finished(1, SAID + "ConnectionError: the other rank hung up"), "ConnectionError: the other rank hung up"),
        (Finished(0, ""), "boxa:1,boxb:1: exit status 0"),
        (
            Finished(1, "------\nprted has detected an attempt\nto run as root.\n\nIt is\n----\n"),
            "attempt to run as root.",
        ),
    ],
)
def test_ranks_that_do_not_meet_are_a_bad_finding(finished: Finished, words: str) -> None:
    measured = judge(finished, "boxa:1,boxb:1")
    assert (measured.finding.status, measured.rows) == ("bad", ())
    assert measured.finding.what.endswith(words)
    assert "firewalls" in measured.finding.fix


class Runner:
    """Takes the place of starting something."""

    def __init__(self) -> None:
        self.argv: list[str] = []
        self.environ: dict[str, str] = {}

    def __call__(self, argv: list[str], environ: dict[str, str], seconds: float) -> Finished:
        self.argv, self.environ = list(argv), dict(environ)
        return Finished(0, SAID)


LINKED: dict[str, tuple[dict[str, object], str, str, list[str]]] = {
    "two hosts": ({}, "boxa,boxb", "-H boxa:1,boxb:1", ["mpi", "boxa"]),
    "this host twice": ({}, "localhost,localhost", "-H localhost:2", ["mpi", "127.0.0.1"]),
    "this host with two slots": ({}, "boxa:2", "-H boxa:2", ["mpi", "127.0.0.1"]),
    "no mpi4py": ({"mpi4py": False}, "boxa,boxb", "-H boxa:1,boxb:1", ["tcp", "boxa"]),
    "Gloo": ({"mpi": None}, "boxb,boxc", "--gloo -np 2 -H boxb:1,boxc:1", ["tcp", "boxb"]),
    "root": ({"root": True}, "boxa,boxb", "--allow-run-as-root", ["mpi", "boxa"]),
}


@pytest.mark.parametrize(("fields", "hosts", "words", "how"), LINKED.values(), ids=LINKED)
def test_two_ranks_are_started_as_run_would(fields: dict[str, object], hosts: str, words: str, how: list[str]) -> None:
    runner = Runner()
    measured = measure_link(dataclasses.replace(SITE, **fields), hosts, runner)  # type: ignore[arg-type]
    assert measured.finding.status == "ok"
    assert words in " ".join(runner.argv)
    assert runner.argv[-6:-1] == [sys.executable, "-m", "hvdplus.doctor.pingpong", *how]
    assert 0 < int(runner.argv[-1]) < 2**16


def test_where_nothing_starts_ranks_there_is_a_finding() -> None:
    measured = measure_link(Site(), "boxa,boxb", Runner())
    assert measured.finding.status == "bad"
    assert "nothing here can start ranks" in measured.finding.what


@pytest.mark.parametrize("hosts", ["boxa", "a,b,c", "a:2,b"])
def test_two_places_are_needed(hosts: str) -> None:
    with pytest.raises(LaunchError, match=f"--hosts {hosts} names [13] places for ranks, not two"):
        measure_link(SITE, hosts, Runner())


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Facts]:
    """Put a machine of facts in the place of this one; the test may change it."""
    machines = [HEALTHY]
    monkeypatch.setattr(command, "Here", lambda script: machines[-1])
    return machines


def invoke(*arguments: str) -> tuple[int, str]:
    """Call the command; return its status and what it printed."""
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.stdout


def test_the_screen_of_a_healthy_machine(machine: list[Facts]) -> None:
    code, screen = invoke()
    assert code == 0
    assert re.search(r"^ok\s+Horovod\s+Horovod 0\.28\.1 for torch-2\.13\.0\+cpu", screen, re.MULTILINE)
    assert screen.rstrip().endswith("10 right, 0 to think about, 0 wrong.")
    assert len(screen.splitlines()) < 40


def test_the_screen_of_a_sick_machine(machine: list[Facts]) -> None:
    machine.append(planted(root=True, shm_bytes=None))
    code, screen = invoke()
    assert code == 1
    text = " ".join(screen.split())
    assert "BAD shared memory there is no /dev/shm, through which ranks of one host exchange -> docker run" in text
    assert "README.md#bus-errors-and-devshm" in text
    assert "warn root you are root" in text
    assert "9 right, 1 to think about, 1 wrong." in text


def test_brackets_are_shown_as_they_are(machine: list[Facts]) -> None:
    machine.append(planted(environ={"HVDPLUS_STRATEGY": "[red]x"}))
    assert "[red]x" in invoke()[1]


def test_warnings_do_not_fail(machine: list[Facts]) -> None:
    machine.append(planted(root=True))
    assert invoke()[0] == 0


def test_json(machine: list[Facts]) -> None:
    machine.append(planted(gpus=1, addresses=()))
    code, text = invoke("--json")
    data = json.loads(text)
    assert code == 1
    assert set(data) == {"version", "host", "fine", "findings", "link"}
    assert (data["fine"], data["link"]) == (False, [])
    by_name = {finding["check"]: finding for finding in data["findings"]}
    assert by_name["host name"] == {
        "check": "host name",
        "status": "bad",
        "what": "the host name boxa does not resolve: ranks over Gloo crash",
        "fix": "add boxa to /etc/hosts",
        "link": "README.md#gloo-and-the-host-name",
    }
    assert by_name["GPUs"]["status"] == "warn"


def test_a_script_that_is_not_there_is_refused() -> None:
    result = CliRunner().invoke(app, ["doctor", "--script", "/nowhere/train.py"])
    assert isinstance(result.exception, LaunchError)
    assert "--script /nowhere/train.py is no file" in str(result.exception)


def test_a_script_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KERAS_IMPORT)
    code, text = invoke("--script", str(tmp_path / "train.py"), "--json")
    keras = [finding for finding in json.loads(text)["findings"] if finding["check"] == "Keras"]
    assert [(finding["status"], "train.py:2" in finding["what"]) for finding in keras] == [("bad", True)]
    assert code == 1


def test_the_table_of_a_link() -> None:
    console = Console(width=100)
    with console.capture() as caught:
        console.print(command.link_table(judge(Finished(0, SAID), "x")))
    assert re.search(r"16,777,216\W+150,000\.0\W+112\.0\W+0\.896", caught.get())


def test_two_real_ranks_are_measured_here() -> None:
    """With the launcher that is here; what it takes is not looked at, only that there is something."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    argv = [sys.executable, "-m", "hvdplus.cli", "doctor", "--hosts", "localhost,localhost", "--json"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=240, check=False)
    data = json.loads(done.stdout)
    link = [finding for finding in data["findings"] if finding["check"] == "hosts"]
    assert [finding["status"] for finding in link] == ["ok"], link
    assert data["link"][0]["size"] == pingpong.SIZES[0]
    assert all(row["microseconds"] > 0 and row["megabytes_a_second"] > 0 for row in data["link"])


def test_a_check_knows_its_section() -> None:
    assert Check("x", "y", lambda machine: ok("z")).link == "README.md#y"
