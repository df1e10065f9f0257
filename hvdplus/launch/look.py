"""Looks at the site: which launchers are on PATH, what Horovod was built for, what a batch system has given."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from hvdplus.build.probe import available_cores, output, package_directory, parse_mpi_version, scripts_directory
from hvdplus.build.probe import search_path as environment_first
from hvdplus.build.record import Record, read_record
from hvdplus.launch.hosts import Host, parse_hostfile
from hvdplus.launch.site import Allocation, Horovod, Mpi, Site
from hvdplus.world import tasks_per_node

_PLUGINS = re.compile(r"\b(?:pmix|pmi2|cray_shasta|none)\b")


def look(environ: Mapping[str, str] = os.environ) -> Site:
    """Find everything that decides how ranks are started here, in a fraction of a second."""
    path = environment_first(environ)
    allocation = find_allocation(environ, path)
    in_slurm = allocation is not None and allocation.system == "slurm"
    srun = shutil.which("srun", path=path)
    return Site(
        mpi=find_mpi(path),
        srun=srun,
        srun_mpi=parse_plugins(output([srun, "--mpi=list"])) if srun and in_slurm else (),
        horovodrun=shutil.which("horovodrun", path=path),
        horovod=find_horovod(),
        mpi4py=importlib.util.find_spec("mpi4py") is not None,
        allocation=allocation,
        environ=dict(environ),
        host=socket.gethostname(),
        root=os.geteuid() == 0,
        cores=available_cores(),
        container=in_container(environ),
        scripts=scripts_directory(),
    )


def find_mpi(path: str) -> Mpi | None:
    """Find the launcher of an MPI; where both names are there, MPICH and its like are called mpiexec."""
    found = {name: program for name in ("mpirun", "mpiexec") if (program := shutil.which(name, path=path))}
    if not found:
        return None
    implementation, version = parse_mpi_version(output([next(iter(found.values())), "--version"]))
    hydra = implementation not in ("openmpi", "spectrum")
    name = "mpiexec" if hydra and "mpiexec" in found else next(iter(found))
    return Mpi(implementation, version, name, found[name])


def parse_plugins(told: str) -> tuple[str, ...]:
    r"""Turn what ``srun --mpi=list`` prints, which differs between versions, into the names of the plugins.

    >>> parse_plugins("MPI plugin types are...\n\tnone\n\tpmix\nspecific pmix plugin versions available: pmix_v4")
    ('none', 'pmix')
    """
    return tuple(sorted(set(_PLUGINS.findall(told))))


def in_container(environ: Mapping[str, str]) -> bool:
    """Say whether this is a container of Docker, Podman or Kubernetes."""
    marks = ("/.dockerenv", "/run/.containerenv")
    return any(Path(mark).exists() for mark in marks) or "KUBERNETES_SERVICE_HOST" in environ


# --- Horovod ------------------------------------------------------------------------------------------------


def find_horovod() -> Horovod | None:
    """Say what the installed Horovod can join, from its record or, without one, from its library."""
    home = package_directory("horovod")
    if home is None:
        return None
    record = read_record()
    if record is not None:
        return parse_key(record)
    library = next(iter(sorted(home.glob("*/mpi_lib*.so"))), None)
    return scan(library) if library else Horovod(gloo=False)


def parse_key(record: Record) -> Horovod:
    """Read a build's key: Gloo is always in it, MPI is named, NCCL too.

    >>> parse_key(Record("horovod-0.28.1_cp311_torch-2.13.0_openmpi-5.0.11_gcc-12"))
    Horovod(gloo=True, mpi='openmpi', nccl=False)
    """
    parts = [part.split("-")[0] for part in record.key.split("_")]
    mpi = next((part for part in parts if part in ("openmpi", "spectrum", "intelmpi", "mpich")), "")
    return Horovod(gloo=True, mpi=mpi, nccl="nccl" in parts)


def scan(library: Path) -> Horovod:
    """Look in a built library for what it was linked to: the names stand there as plain text."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        mpi = {b"libmpi.so.40": "openmpi", b"libmpi_ibm.so": "spectrum", b"libmpi.so.12": "mpich", b"libmpi": "mpich"}
        return Horovod(
            gloo=text.find(b"HOROVOD_GLOO_RENDEZVOUS_ADDR") >= 0,
            mpi=next((name for mark, name in mpi.items() if text.find(mark) >= 0), ""),
            nccl=text.find(b"ncclAllReduce") >= 0,
        )


# --- batch systems ------------------------------------------------------------------------------------------


def find_allocation(environ: Mapping[str, str], path: str) -> Allocation | None:
    """Find the batch job that this shell is in."""
    if environ.get("SLURM_JOB_ID"):
        cpus = environ.get("SLURM_CPUS_PER_TASK", "")
        return Allocation(
            "slurm",
            slurm_hosts(environ, path),
            inside_step=bool(environ.get("SLURM_STEP_ID")),
            cpus_per_task=int(cpus) if cpus.isdigit() else None,
        )
    for system, name in (("pbs", "PBS_NODEFILE"), ("lsf", "LSB_DJOB_HOSTFILE")):
        file = environ.get(name)
        if file and Path(file).is_file():
            return Allocation(system, parse_hostfile(Path(file).read_text(), name))
    return None


def slurm_hosts(environ: Mapping[str, str], path: str) -> tuple[Host, ...]:
    """Return the job's hosts with their tasks; none where ``scontrol`` does not tell them."""
    scontrol = shutil.which("scontrol", path=path)
    nodes, tasks = environ.get("SLURM_JOB_NODELIST"), environ.get("SLURM_TASKS_PER_NODE")
    if not (scontrol and nodes and tasks):
        return ()
    counts = tasks_per_node(tasks, "SLURM_TASKS_PER_NODE")
    names = output([scontrol, "show", "hostnames", nodes]).split()
    return tuple(Host(name, slots) for name, slots in zip(names, counts, strict=False))
