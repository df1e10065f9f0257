"""Runs all checks; one that fails to run is itself a finding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hvdplus.doctor import host, launching, software
from hvdplus.doctor.finding import Check, Finding, Verdict, warn
from hvdplus.doctor.machine import Machine

CHECKS = (
    Check("frameworks", "no-framework", software.frameworks),
    Check("Horovod", "horovod-is-missing-or-was-built-for-other-versions", software.horovod),
    Check("MPI", "another-mpi-than-horovods", launching.mpi),
    Check("horovodrun", "open-mpi-5-and-horovodrun", launching.horovodrun),
    Check("launcher", "a-launcher-that-is-not-believed", launching.launcher),
    Check("start", "nothing-starts-ranks", launching.start),
    Check("root", "open-mpi-refuses-root", launching.root),
    Check("container", "read--1-in-containers", launching.container),
    Check("settings", "settings-that-cannot-be-read", software.settings),
    Check("host name", "gloo-and-the-host-name", host.host_name),
    Check("network", "which-network-interface", host.interfaces),
    Check("shared memory", "bus-errors-and-devshm", host.shared_memory),
    Check("locked memory", "infiniband-and-locked-memory", host.locked_memory),
    Check("GPUs", "gpus-and-ranks", host.gpus),
    Check("Keras", "horovods-own-keras-wrapper", software.keras_wrapper),
    Check("numba", "codecs-are-slow-on-the-host", software.numba),
)


def examine(machine: Machine, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Return what every check has to say about ``machine``."""
    verdicts = [(check, _verdict(check, machine)) for check in checks]
    return [
        Finding(check.name, verdict.status, verdict.what, verdict.fix, check.link)
        for check, verdict in verdicts
        if verdict is not None
    ]


def _verdict(check: Check, machine: Machine) -> Verdict | None:
    try:
        return check.look(machine)
    except Exception as error:  # whatever a machine does, the other checks still speak
        return warn(f"could not be checked: {type(error).__name__}: {error}", "look at it by hand, and report this")


def is_fine(findings: Iterable[Finding]) -> bool:
    """Say whether nothing is bad; warnings are fine."""
    return all(finding.status != "bad" for finding in findings)
