"""Tests of `hvdplus run`: every line from a table of sites, what is found from texts, and two real ranks."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvdplus.build.record import Record
from hvdplus.cli import app
from hvdplus.cli import run as command
from hvdplus.errors import LaunchError
from hvdplus.launch import look as looking
from hvdplus.launch.choice import choose
from hvdplus.launch.hosts import Host, is_local, is_uniform, listed, parse_hostfile, parse_hosts, placed
from hvdplus.launch.line import Job, Line, make_line
from hvdplus.launch.look import find_allocation, find_horovod, find_mpi, look, parse_key, parse_plugins, scan
from hvdplus.launch.site import Allocation, Horovod, Mpi, Site

OPENMPI5 = Mpi("openmpi", "5.0.11", "mpirun", "/env/bin/mpirun")
OPENMPI4 = Mpi("openmpi", "4.1.4", "mpirun", "/usr/bin/mpirun")
MPICH = Mpi("mpich", "5.0.2", "mpiexec", "/usr/bin/mpiexec")
INTEL = Mpi("intelmpi", "2021.18", "mpiexec", "/opt/intel/bin/mpiexec")
SPECTRUM = Mpi("spectrum", "10.3", "mpirun", "/opt/ibm/bin/mpirun")
VENDORS = Mpi("mpi", "unknown", "mpiexec", "/opt/cray/bin/mpiexec")
RUNNER = "/env/bin/horovodrun"
WITH_MPI = Horovod(gloo=True, mpi="openmpi")
GLOO_ONLY = Horovod(gloo=True, mpi="")
# What each kind of site has. Python code in here never looks at the machine that runs the tests.
HERE = Site(mpi=OPENMPI5, horovodrun=RUNNER, horovod=WITH_MPI, mpi4py=True, cores=8, host="boxa")
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
NODES = parse_hosts("n1:2,n2:2")
SLURM = {"srun": "/usr/bin/srun", "srun_mpi": ("none", "pmi2", "pmix"), "allocation": Allocation("slurm", NODES)}
STEP = SLURM | {"allocation": Allocation("slurm", NODES, inside_step=True)}
BOXES = parse_hosts("boxa:2,boxb:2")
UNEVEN = parse_hosts("boxa:2,boxb:1")
SRUN_END = "--cpu-bind=none --kill-on-bad-exit=1 --export=ALL train"


def site(**fields: object) -> Site:
    """Return the common site with some fields changed."""
    return dataclasses.replace(HERE, **fields)  # type: ignore[arg-type]


def job(**fields: object) -> Job:
    """Return a job of two ranks with some fields changed."""
    return dataclasses.replace(Job(("train",), ranks=2), **fields)  # type: ignore[arg-type]


# --- hosts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [("a", "a:1"), ("a:2,b:2", "a:2,b:2"), ("a, b:3 ,a:4", "a:5,b:3"), ("10.0.0.1:2,n-1.site.org", None)],
)
def test_hosts(text: str, hosts: str | None) -> None:
    assert listed(parse_hosts(text)) == (hosts or "10.0.0.1:2,n-1.site.org:1")


@pytest.mark.parametrize("text", ["", "a,", "a:0", "a:x", "a:-1", "a b", "a:1:2", "a:2;rm"])
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"-H has .* which is no host; write NAME or NAME:SLOTS"):
        parse_hosts(text)


@pytest.mark.parametrize(
    "text",
    [
        "a slots=2\nb slots=1 # old\n",
        "# ours\n\na:2\nb:1",
        "a\na\nb\n",
        "a  slots=2 max_slots=4\nb",
    ],
    ids=["Open MPI", "MPICH", "PBS", "further options"],
)
def test_host_files(text: str) -> None:
    assert listed(parse_hostfile(text)) == "a:2,b:1"


@pytest.mark.parametrize(
    ("text", "what"), [("# none\n", "names no host"), ("a slots=0", "'a:0'"), ("a b c", "'a b c'")]
)
def test_host_files_that_are_none(text: str, what: str) -> None:
    with pytest.raises(LaunchError, match=rf"hosts\.txt .*{what}"):
        parse_hostfile(text, "hosts.txt")


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(1, "a:1"), (2, "a:2"), (3, "a:2,b:1"), (6, "a:2,b:1,c:3"), (7, "a:3,b:1,c:3"), (9, "a:3,b:2,c:4")],
)
def test_ranks_fill_hosts_in_order_and_then_go_round(ranks: int, expected: str) -> None:
    assert listed(placed(parse_hosts("a:2,b:1,c:3"), ranks)) == expected


def test_uniform_and_local() -> None:
    assert is_uniform(BOXES) and is_uniform(UNEVEN) and is_uniform((Host("a", 5),))
    assert not is_uniform(parse_hosts("a:1,b:2")) and not is_uniform(parse_hosts("a:2,b:1,c:2"))
    assert is_local(parse_hosts("localhost,127.0.0.1,boxa"), "boxa.site.org")
    assert not is_local(BOXES, "boxa.site.org")


# --- the line, from what a site has -------------------------------------------------------------------------

OPENMPI_LINE = "mpirun -np 2 -H localhost:2 --bind-to none --map-by slot train"
LINES: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "Open MPI 5": ({}, {}, OPENMPI_LINE),
    "Open MPI 4": ({"mpi": OPENMPI4}, {}, OPENMPI_LINE),
    "Open MPI 4 in a container": (
        {"mpi": OPENMPI4, "container": True},
        {},
        "mpirun -np 2 -H localhost:2 --bind-to none --map-by slot --mca btl_vader_single_copy_mechanism none train",
    ),
    "Open MPI 5 in a container": ({"container": True}, {}, OPENMPI_LINE),
    "Open MPI as root, wanted": (
        {"root": True},
        {"allow_root": True},
        "mpirun --allow-run-as-root -np 2 -H localhost:2 --bind-to none --map-by slot train",
    ),
    "Open MPI on two hosts": (
        {},
        {"ranks": 4, "hosts": BOXES},
        "/env/bin/mpirun -np 4 -H boxa:2,boxb:2 --bind-to none --map-by slot train",
    ),
    "Open MPI takes variables along": (
        {"environ": {"HVDPLUS_STRATEGY": "fp16", "PYTHONPATH": "/src", "HOME": "/", "CUDA_VISIBLE_DEVICES": "0"}},
        {},
        "mpirun -np 2 -H localhost:2 --bind-to none --map-by slot -x HVDPLUS_STRATEGY -x PYTHONPATH train",
    ),
    "Open MPI takes more along": (
        {},
        {"forward": ("HOME", "CUDA_VISIBLE_DEVICES", "DATA=/a b")},
        "DATA='/a b' mpirun -np 2 -H localhost:2 --bind-to none --map-by slot -x CUDA_VISIBLE_DEVICES -x DATA -x HOME "
        "train",
    ),
    "more ranks than cores": (
        {"cores": 2},
        {"ranks": 4},
        "mpirun -np 4 -H localhost:2 --bind-to none --map-by slot:OVERSUBSCRIBE train",
    ),
    "more ranks than slots, wanted": (
        {},
        {"ranks": 6, "hosts": BOXES, "oversubscribe": True},
        "/env/bin/mpirun -np 6 -H boxa:2,boxb:2 --bind-to none --map-by slot:OVERSUBSCRIBE train",
    ),
    "as many ranks as slots": (
        {},
        {"ranks": None, "hosts": UNEVEN},
        "/env/bin/mpirun -np 3 -H boxa:2,boxb:1 --bind-to none --map-by slot train",
    ),
    "further options": (
        {},
        {"extra": ("--mca", "btl", "tcp,self")},
        "mpirun -np 2 -H localhost:2 --bind-to none --map-by slot --mca btl tcp,self train",
    ),
    "Kubeflow sets the hosts": (
        {"mpi": OPENMPI4, "environ": {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}},
        {},
        "/usr/bin/mpirun -np 2 --bind-to none --map-by slot train",
    ),
    "an environment that is not activated": (
        {"scripts": "/env/bin", "environ": {"PATH": "/usr/bin:/bin"}},
        {},
        "PATH=/env/bin:$PATH mpirun -np 2 -H localhost:2 --bind-to none --map-by slot -x PATH train",
    ),
    "an environment that is activated": (
        {"scripts": "/env/bin", "environ": {"PATH": "/env/bin:/bin"}},
        {},
        "mpirun -np 2 -H localhost:2 --bind-to none --map-by slot -x PATH train",
    ),
    "PBS": (
        {"allocation": Allocation("pbs", NODES)},
        {"ranks": None},
        "/env/bin/mpirun -np 4 -H n1:2,n2:2 --bind-to none --map-by slot train",
    ),
    "MPICH": ({"mpi": MPICH, "horovod": None}, {}, "mpiexec -genvall -n 2 train"),
    "MPICH as root": ({"mpi": MPICH, "horovod": None, "root": True}, {}, "mpiexec -genvall -n 2 train"),
    "MPICH on two hosts": (
        {"mpi": MPICH, "horovod": None},
        {"ranks": 3, "hosts": BOXES},
        "mpiexec -genvall -hosts boxa:2,boxb:1 -n 3 train",
    ),
    "MPICH on this host, named": (
        {"mpi": MPICH, "horovod": None},
        {"hosts": (Host("localhost", 2),)},
        "mpiexec -genvall -hosts localhost:2 -n 2 train",
    ),
    "MPICH with more ranks than slots": (
        {"mpi": MPICH, "horovod": None},
        {"ranks": 6, "hosts": BOXES, "oversubscribe": True},
        "mpiexec -genvall -hosts boxa:3,boxb:3 -n 6 train",
    ),
    "Intel MPI": ({"mpi": INTEL, "horovod": None}, {}, "mpiexec -genvall -genv I_MPI_PIN off -n 2 train"),
    "Intel MPI on two hosts": (
        {"mpi": INTEL, "horovod": None},
        {"ranks": 3, "hosts": BOXES},
        "mpiexec -genvall -genv I_MPI_PIN off -hosts boxa,boxb -ppn 2 -n 3 train",
    ),
    "Intel MPI on uneven hosts": (
        {"mpi": INTEL, "horovod": None},
        {"ranks": None, "hosts": parse_hosts("boxa:1,boxb:2")},
        "mpiexec -genvall -genv I_MPI_PIN off -n 1 -host boxa train : -n 2 -host boxb train",
    ),
    "a vendor's MPI": ({"mpi": VENDORS, "horovod": None}, {}, "mpiexec -n 2 train"),
    "Spectrum MPI": (
        {"mpi": SPECTRUM, "horovod": Horovod(mpi="spectrum")},
        {},
        "horovodrun --mpi -np 2 train",
    ),
    "Spectrum MPI without Horovod": ({"mpi": SPECTRUM, "horovod": None}, {}, OPENMPI_LINE),
    "Slurm": (SLURM, {}, f"srun --mpi=pmix --ntasks=2 {SRUN_END}"),
    "Slurm, all tasks of the job": (SLURM, {"ranks": None}, f"srun --mpi=pmix --ntasks=4 {SRUN_END}"),
    "Slurm, inside a step": (
        STEP,
        {},
        f"srun --mpi=pmix --ntasks=2 --overlap {SRUN_END}",
    ),
    "Slurm with CPUs per task": (
        SLURM | {"allocation": Allocation("slurm", NODES, cpus_per_task=4)},
        {},
        f"srun --mpi=pmix --ntasks=2 --cpus-per-task=4 {SRUN_END}",
    ),
    "Slurm on hosts of one's own": (
        SLURM,
        {"ranks": 4, "hosts": NODES},
        f"srun --mpi=pmix --ntasks=4 --nodes=2 --ntasks-per-node=2 --nodelist=n1,n2 {SRUN_END}",
    ),
    "Slurm, crowded": (
        SLURM,
        {"ranks": 8, "oversubscribe": True},
        f"srun --mpi=pmix --ntasks=8 --overcommit {SRUN_END}",
    ),
    "Slurm that does not speak PMIx": (
        SLURM | {"srun_mpi": ("none", "pmi2")},
        {},
        "/env/bin/mpirun -np 2 --bind-to none --map-by slot train",
    ),
    "Slurm with MPICH": (
        SLURM | {"mpi": MPICH, "horovod": Horovod(mpi="mpich")},
        {},
        f"srun --mpi=pmi2 --ntasks=2 {SRUN_END}",
    ),
    "Slurm with an MPI of the site's own": (SLURM | {"mpi": None}, {}, f"srun --ntasks=2 {SRUN_END}"),
    "Slurm with Intel MPI finds no PMI": (
        SLURM | {"mpi": INTEL, "horovod": None},
        {},
        "mpiexec -genvall -genv I_MPI_PIN off -n 2 train",
    ),
    "Slurm with Intel MPI": (
        SLURM | {"mpi": INTEL, "horovod": None, "environ": {"I_MPI_PMI_LIBRARY": "/usr/lib/libpmi2.so"}},
        {},
        f"srun --mpi=pmi2 --ntasks=2 {SRUN_END}",
    ),
    "Slurm where Horovod has no MPI": (SLURM | {"horovod": GLOO_ONLY}, {}, "horovodrun --gloo -np 2 -H n1:2 train"),
    "srun on PATH, but no allocation": ({"srun": "/usr/bin/srun"}, {}, OPENMPI_LINE),
    "Horovod without MPI": ({"horovod": GLOO_ONLY}, {}, "horovodrun --gloo -np 2 train"),
    "no MPI": ({"mpi": None}, {}, "horovodrun --gloo -np 2 train"),
    "Horovod of another MPI": ({"mpi": MPICH}, {}, "horovodrun --gloo -np 2 train"),
    "Gloo on two hosts": (
        {"horovod": GLOO_ONLY},
        {"ranks": 3, "hosts": BOXES},
        "horovodrun --gloo -np 3 -H boxa:2,boxb:1 train",
    ),
    "Gloo with more ranks than slots": (
        {"horovod": GLOO_ONLY},
        {"ranks": 6, "hosts": BOXES, "oversubscribe": True},
        "horovodrun --gloo -np 6 -H boxa:3,boxb:3 train",
    ),
    "Gloo by wish": ({}, {"launcher": "horovodrun-gloo"}, "horovodrun --gloo -np 2 train"),
    "horovodrun over Open MPI 5 by wish": (
        {},
        {"launcher": "horovodrun-mpi", "hosts": BOXES},
        "horovodrun --mpi '--binding-args=--bind-to none --map-by slot' -np 2 -H boxa:2 train",
    ),
    "horovodrun over Open MPI 4 by wish": (
        {"mpi": OPENMPI4},
        {"launcher": "horovodrun-mpi"},
        "horovodrun --mpi -np 2 train",
    ),
    "mpirun by wish in Slurm": (
        SLURM,
        {"launcher": "mpirun"},
        "/env/bin/mpirun -np 2 --bind-to none --map-by slot train",
    ),
    "mpi4py alone": ({"horovod": None, "horovodrun": None}, {}, OPENMPI_LINE),
}


@pytest.mark.parametrize(("fields", "asked", "line"), LINES.values(), ids=LINES)
def test_line(fields: dict[str, object], asked: dict[str, object], line: str) -> None:
    assert str(make_line(site(**fields), job(**asked))) == line


@pytest.mark.parametrize(("fields", "asked", "line"), LINES.values(), ids=LINES)
def test_the_printed_line_is_what_is_started(fields: dict[str, object], asked: dict[str, object], line: str) -> None:
    made = make_line(site(**fields), job(**asked))
    words = shlex.split(str(made))
    assert tuple(words[len(made.environ) :]) == made.argv


def test_root_may_be_allowed_by_the_environment() -> None:
    made = make_line(site(root=True, environ=ROOT), job())
    assert "--allow-run-as-root" not in made.argv


NOTES: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "nothing exchanges": ({"horovod": None, "mpi4py": False}, {}, "nothing here lets ranks exchange"),
    "Horovod cannot join": (
        {"horovod": GLOO_ONLY},
        {"launcher": "mpirun"},
        "Horovod is built without MPI, so ranks of mpirun cannot use it",
    ),
    "Horovod is another MPI's": (
        {"mpi": MPICH, "horovodrun": None},
        {},
        "Horovod is built for openmpi, so ranks of mpirun cannot use it",
    ),
    "crowded": ({"cores": 2}, {"ranks": 3}, "3 ranks share 2 cores"),
}


@pytest.mark.parametrize(("fields", "asked", "note"), NOTES.values(), ids=NOTES)
def test_notes(fields: dict[str, object], asked: dict[str, object], note: str) -> None:
    assert [note in line for line in make_line(site(**fields), job(**asked)).notes] == [True]


def test_a_site_without_doubts_has_no_notes() -> None:
    assert make_line(site(), job()).notes == ()


REFUSED: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "nothing is there": ({"mpi": None, "horovod": None, "horovodrun": None}, {}, "nothing here can start ranks"),
    "root": ({"root": True}, {}, "Open MPI refuses to run as root.*--allow-run-as-root"),
    "half of the permission": (
        {"root": True, "environ": {"OMPI_ALLOW_RUN_AS_ROOT": "1"}},
        {},
        "Open MPI refuses to run as root",
    ),
    "no number": ({}, {"ranks": None}, "how many ranks"),
    "none": ({}, {"ranks": 0}, "-np 0 starts nothing"),
    "too many": (
        {},
        {"ranks": 5, "hosts": BOXES},
        r"-np 5 is more than boxa:2,boxb:2 has slots \(4\).*--oversubscribe",
    ),
    "uneven hosts in Slurm": (
        SLURM,
        {"ranks": 3, "hosts": NODES},
        "srun puts equally many ranks on every host, not n1:2,n2:1.*--launcher mpirun",
    ),
    "a vendor's MPI and hosts": (
        {"mpi": VENDORS, "horovod": None},
        {"hosts": BOXES},
        "/opt/cray/bin/mpiexec is of an MPI that hvdplus does not know.*--launcher-args",
    ),
    "no such launcher": (
        {},
        {"launcher": "mpiexec"},
        "--launcher=mpiexec is no launcher; the launchers are auto, srun",
    ),
    "srun outside Slurm": ({}, {"launcher": "srun"}, "--launcher=srun needs an allocation of Slurm"),
    "mpirun without MPI": ({"mpi": None}, {"launcher": "mpirun"}, "--launcher=mpirun needs mpirun or mpiexec"),
    "Gloo without Horovod": (
        {"horovod": None},
        {"launcher": "horovodrun-gloo"},
        "needs a Horovod that is built with Gl",
    ),
    "horovodrun over MPI without": (
        {"horovod": GLOO_ONLY},
        {"launcher": "horovodrun-mpi"},
        "needs a Horovod that is built with MPI",
    ),
    "inside a rank": (
        {"environ": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}},
        {},
        r"this is a rank already: OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 \(openmpi\).*clean_env\(\)",
    ),
    "inside the only rank": ({"environ": {"PMI_RANK": "0", "PMI_SIZE": "1"}}, {}, "this is a rank already: PMI_RANK=0"),
    "inside a task of a step": (
        STEP
        | {"environ": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"}},
        {},
        "this is a rank already: SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2",
    ),
    "variables that ranks would inherit": (
        {"environ": {"RANK": "0", "WORLD_SIZE": "2"}},
        {},
        "this is a rank already: RANK=0 WORLD_SIZE=2",
    ),
}


@pytest.mark.parametrize(("fields", "asked", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(fields: dict[str, object], asked: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message) as caught:
        make_line(site(**fields), job(**asked))
    assert "\n" not in str(caught.value)


def test_the_shell_of_an_interactive_step_is_no_rank() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert choose(site(**STEP, environ=environ)) == "srun"
    assert make_line(site(**STEP, environ=environ), job()).launcher == "srun"


# --- what is found ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "told",
    [
        "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix\n",
        "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4\n",
    ],
    ids=["20.11", "23.11"],
)
def test_srun_tells_its_plugins(told: str) -> None:
    assert parse_plugins(told) == ("none", "pmi2", "pmix")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("horovod-0.28.1_cp311_torch-2.13.0_openmpi-5.0.11_gcc-12_x86_64+avx", Horovod(True, "openmpi")),
        ("horovod-0.28.1_cp311_torch-2.13.0+cu130_gloo-only_gcc-12", Horovod(True, "")),
        (
            "horovod-0.28.1_cp311_torch-2.13.0_intelmpi-2021.5_cuda-13.0_nccl-2.28.9_gcc-12",
            Horovod(True, "intelmpi", True),
        ),
    ],
)
def test_a_builds_key_says_what_it_can_join(key: str, expected: Horovod) -> None:
    assert parse_key(Record(key)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"..libmpi.so.40\0..HOROVOD_GLOO_RENDEZVOUS_ADDR\0..", Horovod(True, "openmpi")),
        (b"..libmpi.so.12\0..ncclAllReduce\0", Horovod(False, "mpich", True)),
        (b"..HOROVOD_GLOO_RENDEZVOUS_ADDR\0", Horovod(True, "")),
    ],
)
def test_a_library_without_a_record_is_looked_into(tmp_path: Path, text: bytes, expected: Horovod) -> None:
    library = tmp_path / "mpi_lib_v2.so"
    library.write_bytes(text)
    assert scan(library) == expected


def test_a_horovod_of_unknown_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "read_record", lambda: None)
    monkeypatch.setattr(looking, "package_directory", lambda name: tmp_path)
    assert find_horovod() == Horovod(gloo=False)  # a package without a library starts nothing
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "mpi_lib_v2.so").write_bytes(b"HOROVOD_GLOO_RENDEZVOUS_ADDR libmpi.so.40")
    assert find_horovod() == WITH_MPI
    monkeypatch.setattr(looking, "package_directory", lambda name: None)
    assert find_horovod() is None


def program(path: Path, prints: str) -> None:
    """Write a program that prints a text."""
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("names", "told", "name"),
    [
        (("mpirun", "mpiexec"), "mpirun (Open MPI) 4.1.4", "mpirun"),
        (("mpirun", "mpiexec"), "HYDRA build details:\n    Version:    4.2.3", "mpiexec"),
        (("mpiexec",), "mpiexec (OpenRTE) 4.1.4", "mpiexec"),
        (("mpirun",), "Intel(R) MPI Library for Linux* OS, Version 2021.5 Build 1", "mpirun"),
        (("mpiexec",), "mpiexec v1.2.3", "mpiexec"),
    ],
)
def test_an_mpi_is_called_by_the_name_it_has(tmp_path: Path, names: tuple[str, ...], told: str, name: str) -> None:
    for each in names:
        program(tmp_path / each, told)
    found = find_mpi(f"{tmp_path}:/bin")
    assert found is not None
    assert (found.name, found.path) == (name, str(tmp_path / name))
    assert find_mpi(str(tmp_path / "nowhere")) is None


def test_a_slurm_job(tmp_path: Path) -> None:
    program(tmp_path / "scontrol", "n1\nn2\nn3")
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    path = f"{tmp_path}:/usr/bin:/bin"
    assert find_allocation(environ, path) == Allocation("slurm", parse_hosts("n1:2,n2:2,n3:1"))
    step = find_allocation(environ | {"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "4"}, "/nowhere")
    assert step == Allocation("slurm", (), inside_step=True, cpus_per_task=4)
    with pytest.raises(LaunchError, match="SLURM_TASKS_PER_NODE='x' is not of Slurm's form"):
        find_allocation(environ | {"SLURM_TASKS_PER_NODE": "x"}, path)


@pytest.mark.parametrize(("name", "system"), [("PBS_NODEFILE", "pbs"), ("LSB_DJOB_HOSTFILE", "lsf")])
def test_a_job_of_another_batch_system(tmp_path: Path, name: str, system: str) -> None:
    (tmp_path / "hosts").write_text("n1\nn1\nn2\n")
    assert find_allocation({name: str(tmp_path / "hosts")}, "") == Allocation(system, parse_hosts("n1:2,n2"))
    assert find_allocation({name: str(tmp_path / "gone")}, "") is None
    assert find_allocation({}, "") is None


def test_looking_here() -> None:
    found = look()
    assert found.cores >= 1
    assert found.root == (os.geteuid() == 0)
    assert found.environ == dict(os.environ)


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Line]:
    """Put a known site in the place of this one, and catch the line instead of starting it."""
    lines: list[Line] = []
    monkeypatch.setattr(command, "look", lambda: HERE)
    monkeypatch.setattr(command, "become", lines.append)
    return lines


def invoke(*arguments: str) -> tuple[int, str, str, BaseException | None]:
    """Call the command line; return status, output, errors and exception."""
    result = CliRunner().invoke(app, ["run", *arguments])
    return result.exit_code, result.stdout, result.stderr, result.exception


def test_the_line_is_shown_and_started(started: list[Line]) -> None:
    assert invoke("-np", "2", "--", "python", "train.py", "--lr", "1")[:3] == (
        0,
        "",
        "mpirun -np 2 -H localhost:2 --bind-to none --map-by slot python train.py --lr 1\n",
    )
    assert [line.launcher for line in started] == ["mpirun"]


def test_options_after_the_program_are_its_own(started: list[Line]) -> None:
    invoke("-np", "2", "python", "-c", "1", "--dry-run", "-np", "3")
    assert started[0].argv[-6:] == ("python", "-c", "1", "--dry-run", "-np", "3")
    assert started[0].argv[1:3] == ("-np", "2")


def test_a_dry_run_prints_the_line_alone(started: list[Line], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "look", lambda: site(cores=1))
    code, out, err, _ = invoke("-np", "2", "--dry-run", "--", "python", "train.py")
    assert (code, out) == (
        0,
        "mpirun -np 2 -H localhost:1 --bind-to none --map-by slot:OVERSUBSCRIBE python train.py\n",
    )
    assert err == "hvdplus: 2 ranks share one core: slow, but right\n"
    assert started == []


def test_all_options(started: list[Line], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("boxa slots=1\nboxb slots=1\n")
    invoke("--hostfile", str(hosts), "--launcher", "mpirun", "-np", "3", "--oversubscribe", "--allow-run-as-root",
           "-x", "A=1", "-x", "B", "--launcher-args", "--mca btl 'tcp,self'", "--", "python")  # fmt: skip
    assert str(started[0]) == (
        "A=1 /env/bin/mpirun -np 3 -H boxa:1,boxb:1 --bind-to none --map-by slot:OVERSUBSCRIBE -x A -x B "
        "--mca btl tcp,self python"
    )
    invoke("-H", "boxa:2,boxb:2", "--", "python")
    assert started[1].argv[1:5] == ("-np", "4", "-H", "boxa:2,boxb:2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-np", "2", "--", "train.py"), "'train.py' is no program on PATH; write 'python train.py'"),
        (("-np", "2", "--", "no-such-program"), "'no-such-program' is no program on PATH, or name it"),
        (("-H", "a", "--hostfile", "f", "--", "python"), "-H a and --hostfile f both name hosts"),
        (("--hostfile", "/nowhere/f", "--", "python"), "--hostfile /nowhere/f cannot be read: No such file"),
        (("-np", "2", "-H", "a:x", "--", "python"), "-H has 'a:x'"),
    ],
)
def test_the_command_refuses(started: list[Line], arguments: tuple[str, ...], message: str) -> None:
    exception = invoke(*arguments)[3]
    assert isinstance(exception, LaunchError)
    assert message in str(exception)
    assert started == []


def test_the_process_becomes_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: calls.append(arguments))
    monkeypatch.setenv("PATH", "/bin")
    program(tmp_path / "mpirun", "")
    command.become(Line("mpirun", ("mpirun", "-np", "1"), {"PATH": str(tmp_path), "A": "1"}))
    ((path, argv, environ),) = calls
    assert (path, argv) == (str(tmp_path / "mpirun"), ("mpirun", "-np", "1"))
    assert isinstance(environ, dict)
    assert (environ["PATH"], environ["A"]) == (f"{tmp_path}:/bin", "1")
    with pytest.raises(LaunchError, match="is not on PATH any more"):
        command.become(Line("mpirun", ("no-such-launcher",)))


# What each of the two real ranks does: it says who it is, cannot start ranks itself, and its child is no rank.
RANK = """
import subprocess, sys, hvdplus
world = hvdplus.discover(require_launcher=True)
nested = subprocess.run([sys.executable, "-m", "hvdplus.cli", "run", "-np", "2", "--", "python"],
                        capture_output=True, text=True, timeout=60)
child = subprocess.run([sys.executable, "-c", "import hvdplus; print(hvdplus.discover().launcher)"],
                       env=hvdplus.clean_env(), capture_output=True, text=True, timeout=60)
with open(f"{sys.argv[1]}/{world.rank}", "w") as out:
    print(world.size, world.local_rank, world.launcher, nested.returncode, "a rank already" in nested.stderr,
          child.stdout.strip(), file=out)
"""


def test_two_real_ranks_start_here(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hvdplus.cli", "run", "-np", "2", "--", "python", "-c", RANK, str(tmp_path)]
    environ = {**os.environ, **ROOT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"two ranks did not end within 180 s:\n{process.communicate()[0]}")
    assert process.returncode == 0, output
    said = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert set(said) == {"0", "1"}, output
    for rank, words in said.items():
        assert words[:2] == ["2", rank]
        assert words[2] in ("openmpi", "mpich", "slurm", "horovodrun")
        assert words[3:] == ["1", "True", "none"]
