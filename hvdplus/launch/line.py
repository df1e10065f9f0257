"""Writes the launcher line (pure): what is found at a site and what is asked for become one command."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdplus.build.verify import binding
from hvdplus.build.versions import release
from hvdplus.errors import LaunchError
from hvdplus.launch import choice
from hvdplus.launch.hosts import Host, is_local, is_uniform, listed, placed, total
from hvdplus.launch.site import Mpi, Site
from hvdplus.world import World, discover, variables

# What Open MPI takes to other hosts only if told to. Hydra, srun and horovodrun take everything.
_FORWARDED = (
    *("HVDPLUS_", "HOROVOD_", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "TF_", "XLA_", "TORCH_", "PYTORCH_", "KERAS_"),
    *("CUDA_", "PYTHON", "PATH", "LD_LIBRARY_PATH"),
)
_LOCAL_VARIABLES = ("CUDA_VISIBLE_DEVICES",)  # a host's own numbers; -x takes them along all the same
_ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


@dataclass(frozen=True)
class Job:
    """What is to be started: a command on so many ranks; no ``ranks`` means all slots there are."""

    command: tuple[str, ...]
    ranks: int | None = None
    hosts: tuple[Host, ...] = ()
    launcher: str = "auto"
    allow_root: bool = False
    oversubscribe: bool = False
    forward: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """A launcher's command line, the variables set before it, and what the user should know."""

    launcher: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items() if name != "PATH"]
        path = [f"PATH={shlex.quote(self.environ['PATH'])}:$PATH"] if "PATH" in self.environ else []
        return " ".join([*path, *settings, shlex.join(self.argv)])


def make_line(site: Site, job: Job) -> Line:
    """Return the line that starts ``job`` at ``site``.

    Raises:
        LaunchError: this is a rank already, nothing here starts ranks, or hosts, ranks and permissions do not fit.
    """
    refuse_nested(site.environ)
    launcher = choice.choose(site, job.launcher)
    ranks = number_of_ranks(site, job)
    layout = lay_out(site, job, launcher, ranks)
    return Line(
        launcher,
        tuple(_WRITERS[launcher](site, job, layout)),
        environ=_settings(site, job),
        notes=(*choice.doubts(site, launcher), *layout.notes),
    )


def environment(line: Line, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to start ``line`` in, on top of ``environ``."""
    path = environ.get("PATH", os.defpath)
    first = [line.environ["PATH"]] if "PATH" in line.environ else []
    return {**environ, **line.environ, "PATH": os.pathsep.join([*first, path])}


def refuse_nested(environ: Mapping[str, str]) -> None:
    """Refuse to start ranks from inside a rank; the one task of an interactive Slurm step is none.

    Raises:
        LaunchError: the environment makes this process a rank.
    """
    world = discover(environ)
    if world.launcher == "none" or (world.launcher == "slurm" and world.size == 1):
        return
    raise LaunchError(
        f"hvdplus run starts ranks from a shell, and this is a rank already: {_quoted(world, environ)}; start it from "
        f"outside, or from a child of this rank with env=hvdplus.clean_env()."
    )


def _quoted(world: World, environ: Mapping[str, str]) -> str:
    names = [name for name in variables(world.launcher) if name in environ]
    return " ".join(f"{name}={environ[name]}" for name in names) + f" ({world.launcher})"


def number_of_ranks(site: Site, job: Job) -> int:
    """Return how many ranks are wanted: as said, else as many as hosts or the allocation have slots."""
    allocated = site.allocation.hosts if site.allocation else ()
    ranks = job.ranks if job.ranks is not None else total(job.hosts or allocated)
    if job.ranks is None and ranks == 0:
        raise LaunchError("how many ranks? give -np N, or hosts with slots (-H boxa:2,boxb:2), or call this in a job.")
    if ranks < 1:
        raise LaunchError(f"-np {ranks} starts nothing; give 1 or more.")
    return ranks


# --- hosts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Ranks on hosts; no hosts means that the launcher knows them. ``crowded``: more ranks than slots."""

    ranks: int
    hosts: tuple[Host, ...] = ()
    crowded: bool = False
    remote: bool = False
    notes: tuple[str, ...] = ()


def lay_out(site: Site, job: Job, launcher: str, ranks: int) -> Layout:
    """Decide which hosts are named to the launcher.

    Raises:
        LaunchError: the hosts have fewer slots than there are ranks, and nobody allowed more.
    """
    hosts = job.hosts or _batch_hosts(site, launcher)
    if hosts:
        crowded = ranks > total(hosts)
        if crowded and not job.oversubscribe:
            raise LaunchError(
                f"-np {ranks} is more than {listed(hosts)} has slots ({total(hosts)}); give hosts more slots "
                f"(NAME:SLOTS), fewer ranks, or --oversubscribe."
            )
        return Layout(ranks, hosts, crowded, remote=not is_local(hosts, site.host))
    if _knows_its_hosts(site):
        return Layout(ranks, crowded=job.oversubscribe, remote=True)
    crowded = ranks > site.cores
    cores = f"{site.cores} cores" if site.cores > 1 else "one core"
    notes = (f"{ranks} ranks share {cores}: slow, but right",) if crowded else ()
    return Layout(ranks, (Host("localhost", min(ranks, site.cores)),), crowded, notes=notes)


def _batch_hosts(site: Site, launcher: str) -> tuple[Host, ...]:
    """Return the allocation's hosts, where the launcher does not find them by itself."""
    if site.allocation is None or (site.allocation.system == "slurm" and not launcher.startswith("horovodrun")):
        return ()
    return site.allocation.hosts


def _knows_its_hosts(site: Site) -> bool:
    """Whether a launcher finds hosts by itself: from Slurm, or from a host file that a cluster has set."""
    told = ("default_hostfile", "HYDRA_HOST_FILE")
    return site.allocation is not None or any(name.endswith(told) for name, value in site.environ.items() if value)


# --- the launchers ------------------------------------------------------------------------------------------


def _mpi(site: Site, job: Job, layout: Layout) -> list[str]:
    assert site.mpi is not None  # choose() saw it
    writers = {"openmpi": _openmpi, "spectrum": _openmpi, "mpich": _hydra, "intelmpi": _hydra}
    return writers.get(site.mpi.implementation, _plain)(site, site.mpi, job, layout)


def _plain(site: Site, mpi: Mpi, job: Job, layout: Layout) -> list[str]:
    """Write what the MPI standard has, for an MPI that does not say who it is (a vendor's, as Cray's)."""
    if job.hosts:
        raise LaunchError(
            f"{mpi.path} is of an MPI that hvdplus does not know, so it cannot write -H {listed(job.hosts)} for it; "
            f"pass its own options with --launcher-args, or call it inside a job."
        )
    return [mpi.name, "-n", str(layout.ranks), *job.extra, *job.command]


def _openmpi(site: Site, mpi: Mpi, job: Job, layout: Layout) -> list[str]:
    # Called by its full path, mpirun tells other hosts where its daemon lies.
    program = mpi.path if layout.remote else mpi.name
    hosts = ["-H", listed(layout.hosts)] if layout.hosts else []
    mapping = "slot:OVERSUBSCRIBE" if layout.crowded else "slot"
    # In containers reading another process's memory is forbidden: "Read -1, expected N, errno = 1".
    copy = (
        ["--mca", "btl_vader_single_copy_mechanism", "none"] if site.container and release(mpi.version) < (5,) else []
    )
    forwarded = [word for name in forwarded_names(site, job) for word in ("-x", name)]
    return [
        program,
        *_root_option(site, job),
        *("-np", str(layout.ranks), *hosts, "--bind-to", "none", "--map-by", mapping),
        *(*copy, *forwarded, *job.extra, *job.command),
    ]


def _root_option(site: Site, job: Job) -> list[str]:
    if not site.root or all(site.environ.get(name) == "1" for name in _ROOT_VARIABLES):
        return []
    if job.allow_root:
        return ["--allow-run-as-root"]
    raise LaunchError(
        f"Open MPI refuses to run as root, whose mistakes can damage the system; become another user, or say that you "
        f"want it: hvdplus run --allow-run-as-root (or export {_ROOT_VARIABLES[0]}=1 {_ROOT_VARIABLES[1]}=1)."
    )


def forwarded_names(site: Site, job: Job) -> list[str]:
    """Name the variables that Open MPI is told to take to other hosts."""
    asked = [item.partition("=")[0] for item in job.forward]
    found = (name for name in site.environ if name.startswith(_FORWARDED) and name not in _LOCAL_VARIABLES)
    return sorted({*asked, *found})


def _hydra(site: Site, mpi: Mpi, job: Job, layout: Layout) -> list[str]:
    intel = mpi.implementation == "intelmpi"
    first = [mpi.name, "-genvall", *(["-genv", "I_MPI_PIN", "off"] if intel else []), *job.extra]
    count = ["-n", str(layout.ranks)]
    hosts = placed(layout.hosts, layout.ranks)
    if not layout.remote and not job.hosts:
        return [*first, *count, *job.command]
    if not intel:
        return [*first, *(["-hosts", listed(hosts)] if hosts else []), *count, *job.command]
    if not hosts or is_uniform(hosts):
        names = ",".join(host.name for host in hosts)
        per_host = ["-hosts", names, "-ppn", str(hosts[0].slots)] if hosts else []
        return [*first, *per_host, *count, *job.command]
    groups = [["-n", str(host.slots), "-host", host.name, *job.command] for host in hosts]
    return [*first, *groups[0], *(word for group in groups[1:] for word in (":", *group))]


def _srun(site: Site, job: Job, layout: Layout) -> list[str]:
    allocation = site.allocation
    assert allocation is not None  # choose() saw it
    cpus = allocation.cpus_per_task  # since Slurm 22.05 srun no longer takes it from the job
    return [
        "srun",
        *choice.srun_option(site),
        f"--ntasks={layout.ranks}",
        *_srun_hosts(placed(layout.hosts, layout.ranks)),
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *(["--overcommit"] if layout.crowded else []),
        # A step's own shell holds the step's resources; without this a step inside it waits for ever.
        *(["--overlap"] if allocation.inside_step else []),
        *("--cpu-bind=none", "--kill-on-bad-exit=1", "--export=ALL"),
        *(*job.extra, *job.command),
    ]


def _srun_hosts(hosts: tuple[Host, ...]) -> list[str]:
    if not hosts:
        return []
    if any(host.slots != hosts[0].slots for host in hosts):
        # --distribution=arbitrary could, but with Slurm 22.05 every later step of the job then fails.
        raise LaunchError(
            f"srun puts equally many ranks on every host, not {listed(hosts)}; give all hosts the same number, or use "
            f"--launcher mpirun."
        )
    names = ",".join(host.name for host in hosts)
    return [f"--nodes={len(hosts)}", f"--ntasks-per-node={hosts[0].slots}", f"--nodelist={names}"]


def _horovodrun_gloo(site: Site, job: Job, layout: Layout) -> list[str]:
    return ["horovodrun", "--gloo", *_horovodrun_rest(job, layout)]


def _horovodrun_mpi(site: Site, job: Job, layout: Layout) -> list[str]:
    assert site.mpi is not None  # choose() saw it
    options = binding(site.mpi.version) if site.mpi.implementation == "openmpi" else []
    return ["horovodrun", "--mpi", *options, *_horovodrun_rest(job, layout)]


def _horovodrun_rest(job: Job, layout: Layout) -> list[str]:
    named = layout.hosts if job.hosts or layout.remote else ()
    hosts = ["-H", listed(placed(named, layout.ranks))] if named else []
    return ["-np", str(layout.ranks), *hosts, *job.extra, *job.command]


_WRITERS = {
    "srun": _srun,
    "mpirun": _mpi,
    "horovodrun-mpi": _horovodrun_mpi,
    "horovodrun-gloo": _horovodrun_gloo,
}


def _settings(site: Site, job: Job) -> dict[str, str]:
    """Return the variables to set: those given with a value, and PATH where this environment is not activated."""
    given = dict(item.split("=", 1) for item in job.forward if "=" in item)
    on_path = not site.scripts or site.scripts in site.environ.get("PATH", "").split(":")
    return given if on_path else {"PATH": site.scripts, **given}
