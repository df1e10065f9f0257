"""Checks of how ranks start here: the launcher that was seen, the MPI, root, containers, and the line to use."""

from __future__ import annotations

from hvdplus.build.versions import release
from hvdplus.doctor.finding import Verdict, bad, ok, warn
from hvdplus.doctor.machine import Machine
from hvdplus.engines import built_for
from hvdplus.errors import LaunchError
from hvdplus.launch.line import Job, make_line
from hvdplus.launch.site import Site, same_family
from hvdplus.world import MPI_LAUNCHERS, World, discover

_TWO_RANKS = Job(("python", "train.py"), ranks=2, allow_root=True)


def launcher(machine: Machine) -> Verdict:
    """Say which launcher started this process, and whether an engine can serve its ranks."""
    site = machine.site
    try:
        world = discover(site.environ)
    except LaunchError as error:
        return bad(str(error).rstrip("."), "unset what a launcher left in this shell")
    if world.launcher == "none":
        return ok(f"no launcher started this: a shell{_allocation(site)}")
    place = f"{world.launcher} started this as rank {world.rank} of {world.size}"
    if world.size > 1 and not _served(site, world):
        return bad(f"{place}, but no engine here can serve it", "hvdplus install-horovod, or pip install mpi4py")
    return ok(place)


def _allocation(site: Site) -> str:
    return f" in an allocation of {site.allocation.system}" if site.allocation else ""


def _served(site: Site, world: World) -> bool:
    horovod = site.horovod is not None and built_for(world, site.horovod.gloo, bool(site.horovod.mpi))
    return horovod or (site.mpi4py and world.launcher in MPI_LAUNCHERS)


def start(machine: Machine) -> Verdict | None:
    """Say with which launcher `hvdplus run` would start two ranks."""
    site = machine.site
    try:
        if discover(site.environ).size > 1:
            return None
        line = make_line(site, _TWO_RANKS)
    except LaunchError as error:
        return bad(str(error).rstrip("."), "see 'hvdplus run --help'")
    if line.notes:
        return warn(f"'hvdplus run -np 2' uses {line.launcher}, but {line.notes[0]}", "see 'hvdplus run --help'")
    return ok(f"'hvdplus run -np 2' uses {line.launcher}")


def mpi(machine: Machine) -> Verdict:
    """Say which MPI is first on PATH, and whether Horovod was built with it."""
    site = machine.site
    wants = site.horovod.mpi if site.horovod else ""
    if site.mpi is None:
        if wants:
            return warn(f"no mpirun is on PATH, but Horovod was built with {wants}", "load that MPI's module")
        return ok("no MPI: ranks start with horovodrun over Gloo")
    here = f"{site.mpi.implementation} {site.mpi.version} ({site.mpi.path})"
    if wants and not same_family(wants, site.mpi.implementation):
        return bad(
            f"{here} is first on PATH, but Horovod was built with {wants}: every rank would be alone",
            f"put {wants} first on PATH, or hvdplus install-horovod",
        )
    built = _built_version(machine, wants)
    if built and release(built)[:1] != release(site.mpi.version)[:1]:
        return warn(f"{here} is first on PATH, but Horovod was built with {wants} {built}", "hvdplus install-horovod")
    return ok(here)


def _built_version(machine: Machine, implementation: str) -> str:
    parts = machine.record.key.split("_") if machine.record and implementation else []
    named = (part.partition("-") for part in parts)
    return next((version for name, _, version in named if name == implementation), "")


def horovodrun(machine: Machine) -> Verdict | None:
    """Warn of horovodrun with Open MPI 5, whose options it writes as Open MPI 4 had them."""
    site = machine.site
    if not (site.horovodrun and site.horovod and site.horovod.mpi) or _openmpi_major(site) < 5:
        return None
    return warn(
        f"plain horovodrun fails with Open MPI {_openmpi_major(site)}",
        "hvdplus run, horovodrun --gloo, or horovodrun --binding-args='--bind-to none --map-by slot'",
    )


def root(machine: Machine) -> Verdict | None:
    """Say whether Open MPI would refuse to run as root."""
    site = machine.site
    if not site.root or not _openmpi_major(site):
        return None
    if all(site.environ.get(name) == "1" for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")):
        return ok("root, and Open MPI is told to allow it")
    return warn(
        "you are root, and mpirun of Open MPI refuses that",
        "be another user; or, in a container, export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    )


def _openmpi_major(site: Site) -> int:
    """Return Open MPI's major version; 0 for another MPI, or none."""
    here = site.mpi if site.mpi and site.mpi.implementation == "openmpi" else None
    return (*release(here.version), 1)[0] if here else 0


def container(machine: Machine) -> Verdict | None:
    """Warn of Open MPI 4's shared memory in a container, which may not read other processes' memory."""
    site, name = machine.site, "OMPI_MCA_btl_vader_single_copy_mechanism"
    if not site.container or not 0 < _openmpi_major(site) < 5:
        return None
    if site.environ.get(name) == "none":
        return ok(f"a container, and {name}=none")
    what = "in a container Open MPI 4 prints 'Read -1, expected N, errno = 1'"
    return warn(what, f"hvdplus run, which sees to it, or export {name}=none")
