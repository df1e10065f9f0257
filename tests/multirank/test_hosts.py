"""Training across two hosts, reached by a real sshd: what they learn, and what is said when a link goes down."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import harness
import hosts as hosts_module
import hosts_training
import numpy as np
import pytest
from hosts import Hosts

TRAIN = str(harness.HERE / "hosts_training.py")
SECONDS = 4  # HVDPLUS_TIMEOUT
SLOW = 0.02  # Gbit/s: an exchange takes 0.4 s
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/sbin")
WAY = "sshd" if SSHD and shutil.which("ssh") and shutil.which("ssh-keygen") else "no-sshd-but-a-program-in-its-place"

pytestmark = pytest.mark.skipif(hosts_module.supported() is not None, reason=str(hosts_module.supported()))

SSHD_CONFIG = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
LogLevel ERROR
SetEnv PATH={bin}:/usr/local/bin:/usr/bin:/bin TMPDIR={temporary}
"""
SSH = """#!/bin/sh
exec {ssh} -F none -i {folder}/key -o UserKnownHostsFile={folder}/known -o ConnectionAttempts=10 -o LogLevel=ERROR "$@"
"""


def start_sshd(hosts: Hosts) -> dict[str, str]:
    """Start an sshd on every host; return the environment in which launchers use ssh to reach them."""
    folder = hosts.folder / "real"
    folder.mkdir()
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd started by root wants it
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    (folder / "known").write_text("* " + (folder / "key.pub").read_text())
    (folder / "ssh").write_text(SSH.format(ssh=shutil.which("ssh"), folder=folder))
    (folder / "ssh").chmod(0o755)
    for host in hosts:
        config = folder / f"sshd_config.{host.name}"
        config.write_text(SSHD_CONFIG.format(folder=folder, bin=harness.BIN, temporary=hosts.folder / host.name))
        hosts.popen(host, [SSHD, "-D", "-e", "-f", str(config)])
    agent = str(folder / "ssh")
    path = f"{folder}:{hosts.environment(hosts[0])['PATH']}"
    return {"PATH": path, "OMPI_MCA_plm_rsh_agent": agent, "PRTE_MCA_plm_ssh_agent": agent}


@pytest.fixture(scope="module", params=[WAY])
def two():
    """Two hosts, and what launchers need in their environment."""
    with Hosts(2, gbit=1.0) as hosts:
        yield hosts, {**harness.ENVIRONMENT, **(start_sshd(hosts) if WAY == "sshd" else {})}


@pytest.fixture(scope="module")
def expected():
    return hosts_training.alone()


def launch(name: str, hosts: Hosts, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command line that starts one rank a host, and the engine it is for."""
    program = [sys.executable, TRAIN, str(folder)]
    if name == "horovodrun":
        return ["horovodrun", "--gloo", "-np", "2", "-H", "boxa:1,boxb:1", *program], {"HVDPLUS_ENGINE": "horovod"}
    (folder / "hostfile").write_text("boxa slots=1\nboxb slots=1\n")
    line = ["mpirun", "--hostfile", str(folder / "hostfile"), "-np", "2", "--bind-to", "none", "--map-by", "slot"]
    forward = ["HVDPLUS_ENGINE", "HVDPLUS_TIMEOUT", "OMP_NUM_THREADS", *(["PYTHONPATH"] * ("PYTHONPATH" in os.environ))]
    names = [part for variable in forward for part in ("-x", variable)]
    return [*line, *names, *program], {"HVDPLUS_ENGINE": name.removeprefix("mpirun-")}


def logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("rank*.log")))


def check_learnt(folder: Path, expected: np.ndarray):
    """Both ranks ended, each on its own host, with what one process learns."""
    for rank, host in enumerate(("boxa", "boxb")):
        assert f"finished on {host}" in (folder / f"rank{rank}.log").read_text(), logs(folder)
    first, second = (np.load(folder / f"rank{rank}.npy") for rank in range(2))
    assert np.array_equal(first, second)
    assert np.abs(first - expected).max() < 1e-6


@pytest.mark.parametrize("name", ["horovodrun", "mpirun-horovod"])
def test_two_hosts_learn_what_one_process_learns(name, two, expected, tmp_path):
    hosts, environment = two
    line, engine = launch(name, hosts, tmp_path)
    done = hosts.run(hosts[0], line, {**environment, **engine}, timeout=100)
    assert done.returncode == 0, done.stdout + logs(tmp_path)
    check_learnt(tmp_path, expected)


def until(true, what: str, folder: Path, seconds: float = 90.0):
    """Wait until `true()` is; fail with all logs where it never is."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what} did not come in {seconds} s:\n{logs(folder)}"
        time.sleep(0.02)


def alive(log: Path) -> bool:
    pid = re.search(r"^process (\d+)$", log.read_text(), re.M)[1]
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def reached(step: int, folder: Path) -> bool:
    """Have both ranks begun a step?"""
    found = [folder / f"rank{rank}.log" for rank in range(2)]
    return all(path.exists() and f"step {step}\n" in path.read_text() for path in found)


@pytest.fixture
def at_step_3(two, tmp_path):
    """Start ranks over slow links, and pull out the cable of the second host when both ranks are in step 3."""
    hosts, environment = two
    launchers = []

    def start(name: str, limit: int) -> Hosts:
        line, engine = launch(name, hosts, tmp_path)
        hosts.shape(SLOW)
        launchers.append(hosts.popen(hosts[0], line, {**environment, **engine, "HVDPLUS_TIMEOUT": str(limit)}))
        until(lambda: reached(3, tmp_path), "step 3", tmp_path)
        hosts.set_link(hosts[1], False)
        return hosts

    yield start
    hosts.set_link(hosts[1], True)
    hosts.shape(1.0)
    for launcher in launchers:
        launcher.kill()


@pytest.mark.parametrize("name", ["horovodrun", "mpirun-mpi"])
def test_a_link_that_goes_down_in_an_exchange_is_named_on_both_sides(name, at_step_3, tmp_path):
    at_step_3(name, SECONDS)
    begin = time.monotonic()
    found = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    until(lambda: not any(map(alive, found)), "the end of both ranks", tmp_path)
    print(f"both ended {time.monotonic() - begin:.1f} s after the link went down\n{logs(tmp_path)}")
    names = ["rank 0 (boxa)", "rank 1 (boxb)"]
    for log, here, there in zip(found, names, reversed(names), strict=True):
        says = (
            f"hvdplus: {here} cannot finish step 3, bucket 0 (bias ... weight): nothing came within "
            f"HVDPLUS_TIMEOUT={SECONDS} s: {there} does not answer (stopped, or cut off)"
        )
        text = log.read_text()
        assert text.count("cannot finish") == text.count(says) == 1, text
        assert "Traceback" not in text


def test_a_link_that_comes_back_in_time_does_no_harm(at_step_3, expected, tmp_path):
    hosts = at_step_3("mpirun-mpi", 60)
    time.sleep(1.0)
    hosts.set_link(hosts[1], True)
    until(lambda: logs(tmp_path).count("finished on") == 2, "the end", tmp_path)
    check_learnt(tmp_path, expected)
