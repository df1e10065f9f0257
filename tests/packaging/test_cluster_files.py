"""The files for containers and clusters agree with the image, the examples, the README, and among themselves."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
SCRIPTS = ("slurm/train.sbatch", "slurm/train-pyxis.sbatch", "lsf/train.lsf")
BIN = DOCKER / "image" / "bin"
# What a launcher gets is written down instead of started.
RECORD = '#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@" > "$RECORD"\n'


def setting(path: Path, name: str) -> str:
    """The value of the first line `name value` or `name = value`, indented or not."""
    found = re.search(rf"^\s*{name}[ =]+(\S+)$", path.read_text(), re.M)
    assert found, f"{path.name} has no {name}"
    return found[1]


def dockerfile() -> list[str]:
    """The Dockerfile's instructions, with continued lines joined, without comments."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line]


def example_in(words: list[str]) -> Path:
    (program,) = [word for word in words if word.endswith(".py")]
    assert (ROOT / program).is_file(), program
    return ROOT / program


# --- the image ------------------------------------------------------------------------------------------------


def test_bases_are_arguments_with_pinned_defaults():
    bases = [line for line in dockerfile() if line.startswith("FROM")]
    assert [base.split()[1] for base in bases] == ["${BUILD_BASE}", "${BASE}"]
    for name in ("BUILD_BASE", "BASE"):
        assert re.search(rf"^ARG {name}=[a-z]+:[\w.]*\d[\w.-]*$", (DOCKER / "Dockerfile").read_text(), re.M)


def test_everything_pip_installs_by_name_is_pinned():
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "requirements/dev.txt").read_text().splitlines() if "==" in line
    }
    text = "\n".join(dockerfile())
    frameworks = re.findall(r'ARG FRAMEWORKS="(.*)"', text)[0].split()
    named = [
        word
        for install in re.findall(r"pip install -q -c /src/requirements/dev.txt ([^&\n]*)", text)
        for word in shlex.split(install)
        if not word.startswith(("-", "$"))
    ]
    assert {"mlxtend", "mpi4py", "cmake"} <= set(named)
    assert set(named + frameworks) <= pinned


def test_packages_of_the_system_leave_nothing_behind():
    installs = [line for line in dockerfile() if "apt-get install" in line]
    assert len(installs) == 2
    for line in installs:
        assert "--no-install-recommends" in line
        assert "rm -rf /var/lib/apt/lists/*" in line


def test_what_is_copied_is_there_and_reaches_the_builder():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copies = [line.split() for line in dockerfile() if line.startswith("COPY") and "--from" not in line]
    sources = [source for words in copies for source in words[1:-1] if source != "."]
    assert len(sources) >= 5
    for source in [*sources, "pyproject.toml"]:
        assert (ROOT / source).exists(), source
        assert any(source.startswith(name) for name in kept), f"{source} is held back by .dockerignore"
    for name in kept:
        assert (ROOT / name).exists(), name


def test_the_default_user_is_not_root_and_the_image_is_tried_as_that_user():
    lines = dockerfile()
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])
    assert [line for line in lines[lines.index(f"USER {users[-1]}") :] if line.startswith("RUN hvdplus doctor")]


def test_keys_are_made_when_a_job_starts_and_are_nowhere_in_the_project():
    tracked = [path for path in DOCKER.rglob("*") if path.is_file()]
    assert not [path for path in tracked if "PRIVATE KEY" in path.read_text()]
    assert "/etc/ssh/ssh_host_*" in "\n".join(dockerfile())


def test_ssh_settings_fit_together():
    client, server = DOCKER / "image/ssh_config", DOCKER / "image/sshd_config"
    assert setting(client, "Port") == setting(server, "Port")
    assert setting(client, "StrictHostKeyChecking") == "yes"
    assert (BIN / Path(setting(client, "KnownHostsCommand")).name).exists()
    assert Path(setting(server, "HostKey")).name in (BIN / "hvdplus-keys").read_text()
    assert setting(server, "PasswordAuthentication") == "no"


@pytest.mark.parametrize("script", sorted(path.name for path in BIN.iterdir()))
def test_programs_of_the_image_are_sound_shell(script):
    assert os.access(BIN / script, os.X_OK)
    subprocess.run(["sh", "-n", BIN / script], check=True)


def test_the_job_key_is_made_once(tmp_path):
    if not any((Path(folder) / "ssh-keygen").exists() for folder in os.get_exec_path()):
        pytest.skip("no ssh-keygen here (Debian and Ubuntu: apt install openssh-client)")
    (tmp_path / ".ssh").mkdir()
    made = []
    for _ in range(2):
        subprocess.run([BIN / "hvdplus-keys"], check=True, env={**os.environ, "HOME": str(tmp_path)})
        made.append((tmp_path / ".ssh/id_rsa").read_bytes())
    assert made[0] == made[1]
    known = subprocess.run(
        [BIN / "hvdplus-known-hosts"], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, check=True
    )
    assert known.stdout == b"* " + (tmp_path / ".ssh/authorized_keys").read_bytes()


# --- compose and Kubernetes -----------------------------------------------------------------------------------


def test_compose_starts_a_rank_on_every_host():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    command = services["boxa"]["command"]
    slots = dict(item.split(":") for item in command[command.index("-H") + 1].split(","))
    assert set(slots) == {service["hostname"] for service in services.values() if "hostname" in service}
    assert int(command[command.index("-np") + 1]) == sum(map(int, slots.values()))
    example_in(command)
    home = str(Path(setting(DOCKER / "image/sshd_config", "HostKey")).parent)
    names = list(services)
    for name, service in services.items():
        assert service["image"].endswith(":-hvdplus:cpu}")
        assert [volume.split(":")[1] for volume in service["volumes"]] == [home]
        for other in service.get("depends_on", {}):
            assert names.index(other) < names.index(name), "compose_buildah.py starts them as they stand"
    for name in ("keys", "boxb"):
        assert (BIN / services[name]["command"][0]).exists()


def test_the_mpijob_adds_up():
    job = yaml.safe_load((DOCKER / "kubernetes/mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    assert spec["sshAuthMountPath"] == str(Path(setting(DOCKER / "image/sshd_config", "HostKey")).parent)
    parts = spec["mpiReplicaSpecs"]
    launcher, worker = (parts[role]["template"]["spec"]["containers"][0] for role in ("Launcher", "Worker"))
    assert launcher["image"] == worker["image"]
    assert worker["readinessProbe"]["tcpSocket"]["port"] == int(setting(DOCKER / "image/sshd_config", "Port"))
    assert (BIN / worker["command"][0]).exists()
    assert launcher["command"][0] == "mpirun"
    assert "-np" not in launcher["command"], "mpirun fills the operator's slots by itself"
    (threads,) = [int(word.split("=")[1]) for word in launcher["command"] if word.startswith("OMP_NUM_THREADS=")]
    assert int(worker["resources"]["limits"]["cpu"]) == spec["slotsPerWorker"] * threads
    example_in(launcher["command"])
    for pod in (launcher, worker):
        assert pod["securityContext"]["runAsNonRoot"] is True


# --- batch systems --------------------------------------------------------------------------------------------


def submitted(script: str, folder: Path) -> list[str]:
    """Run a batch script as its system would, with launchers that only write down how they were called."""
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    for launcher in ("srun", "mpirun"):
        (folder / launcher).write_text(RECORD)
        (folder / launcher).chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RECORD": str(folder / "called"),
        "SLURM_CPUS_PER_TASK": "4",
        "LSB_DJOB_NUMPROC": "4",
        "LSB_DJOB_HOSTFILE": str(folder / "hosts"),
    }
    subprocess.run(["bash", DOCKER / script], cwd=folder, env=environment, check=True, timeout=20)
    return (folder / "called").read_text().splitlines()


@pytest.mark.parametrize("script", SCRIPTS)
def test_batch_scripts_start_an_example_that_exists(script, tmp_path):
    subprocess.run(["bash", "-n", DOCKER / script], check=True)
    called = submitted(script, tmp_path)
    assert called[0] == ("mpirun" if script.startswith("lsf") else "srun")
    program = called.index(example := str(example_in(called).relative_to(ROOT)))
    assert called[program - 1 :] == ["python", example, "--strategy", "exact"]


def test_slurm_tasks_get_their_cores_and_pyxis_its_image(tmp_path):
    called = submitted("slurm/train-pyxis.sbatch", tmp_path)
    assert "--cpus-per-task=4" in called, "srun does not take it over from sbatch"
    assert "--container-image=hvdplus.sqsh" in called
    assert f"--container-workdir={tmp_path}" in called
    options = [re.findall(r"^#SBATCH .*", (DOCKER / name).read_text(), re.M) for name in SCRIPTS[:2]]
    assert options[0] == options[1]


def test_lsf_ranks_fill_their_hosts(tmp_path):
    text = (DOCKER / "lsf/train.lsf").read_text()
    ranks, each, cores = (int(re.findall(p, text)[0]) for p in (r"-n (\d+)", r"ptile=(\d+)", r"core\((\d+)\)"))
    assert ranks % each == 0
    called = submitted("lsf/train.lsf", tmp_path)
    assert called[called.index("-np") + 1] == str(ranks)
    assert f"OMP_NUM_THREADS={cores}" in called


@pytest.mark.parametrize("file", [*SCRIPTS, "kubernetes/mpijob.yaml"])
def test_the_readme_shows_the_three_lines_to_change(file):
    lines = [line.strip() for line in (DOCKER / file).read_text().splitlines()]
    change = [line for line in lines if "# <-" in line or line.startswith(("#SBATCH --nodes=", "#BSUB -n "))]
    assert len(change) == 3
    shown = [line.strip() for line in (ROOT / "README.md").read_text().splitlines()]
    for line in change:
        assert line in shown
