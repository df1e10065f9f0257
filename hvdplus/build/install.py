"""Carries out a plan: build the wheel or take it from the cache, install it, check it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hvdplus.build import HOROVOD_VERSION, BuildError
from hvdplus.build.command import build_command, build_environment, inherited, wrapper_text
from hvdplus.build.compiler import write_wrapper
from hvdplus.build.diagnose import diagnose
from hvdplus.build.probe import search_path
from hvdplus.build.process import run_logged
from hvdplus.build.recipe import Plan
from hvdplus.build.record import Record, write_record
from hvdplus.build.store import Store
from hvdplus.build.verify import Check, Verdict, run_check


class Reporter(Protocol):
    """Shows a user what goes on."""

    def say(self, text: str) -> None:
        """Show one line."""

    def building(self) -> AbstractContextManager[Callable[[str], None]]:
        """Show progress while the lines of a build's log are handed in."""


@dataclass(frozen=True)
class Installer:
    """One plan, the cache it goes through, and whom to tell."""

    plan: Plan
    store: Store
    reporter: Reporter

    def run(self, force: bool = False) -> None:
        """Do all of it; raise BuildError at the first thing that fails."""
        log = self.store.log_path(self.plan.key)
        self.prepare(log)
        wheel = None if force else self.store.find(self.plan.key)
        if wheel:
            self.reporter.say(f"Taking the wheel from the cache: {wheel.parent}")
        else:
            wheel = self.build(log, force)
        self.install(wheel, log)
        self.verify(log)

    def prepare(self, log: Path) -> None:
        """Install what the build and Horovod itself need."""
        if self.plan.requirements:
            self.reporter.say(f"Installing {', '.join(self.plan.requirements)}")
            self.pip(["install", *self.plan.requirements], log)

    def build(self, log: Path, force: bool) -> Path:
        """Compile Horovod and keep the wheel."""
        self.reporter.say(f"Building Horovod {HOROVOD_VERSION}; the log is {log}")
        with self.store.workspace() as work:
            lay_out(self.plan, work)
            environ = {**self.environ(), **build_environment(self.plan, work)}
            with self.reporter.building() as on_line:
                status = run_logged(build_command(sys.executable, work / "wheels"), environ, log, on_line)
            if status != 0:
                raise failure("Horovod could not be built", log)
            if force:
                self.store.discard(self.plan.key)
            return self.store.publish(self.plan.key, work / "wheels")

    def install(self, wheel: Path, log: Path) -> None:
        """Install the wheel and remember what it was built for."""
        self.reporter.say(f"Installing {wheel.name}")
        self.pip(["install", "--no-deps", "--force-reinstall", str(wheel)], log)
        write_record(self.plan.key, checked=())

    def verify(self, log: Path) -> None:
        """Let two ranks talk in each framework over each transport."""
        checks = checks_of(self.plan)
        for check in checks:
            self.check(check, log)
        write_record(self.plan.key, checked=[str(check) for check in checks])

    def check(self, check: Check, log: Path) -> None:
        """Run one check and say how it went."""
        verdict = run_check(check, sys.executable, search_path(os.environ))
        with log.open("a") as file:
            file.write(f"\n--- two ranks, {check} ---\n{verdict.output}\n")
        if not verdict.passed:
            raise BuildError(check_message(check, verdict, log))
        self.reporter.say(f"Two ranks, {check}: passed")

    def pip(self, arguments: Sequence[str], log: Path) -> None:
        """Call this environment's pip."""
        command = [sys.executable, "-m", "pip", *arguments]
        if run_logged(command, self.environ(), log, lambda line: None) != 0:
            raise failure(f"`pip {' '.join(arguments)}` failed", log)

    def environ(self) -> dict[str, str]:
        """Return the user's variables, with this environment's commands first on PATH."""
        return {
            **inherited(os.environ),
            "PATH": search_path(os.environ),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }


def lay_out(plan: Plan, work: Path) -> None:
    """Write the files that the build's environment points to."""
    write_wrapper(work / "cxx", wrapper_text(plan))
    if plan.nccl:
        (work / "nccl").mkdir()
        (work / "nccl" / "libnccl.so").symlink_to(plan.nccl.library)


def checks_of(plan: Plan) -> list[Check]:
    """Return one check for each framework over each transport that can be started here."""
    mpi = plan.mpi if plan.mpi and plan.mpi.mpirun else None
    nccl = plan.nccl is not None
    gloo = [Check(framework, "gloo", nccl=nccl) for framework in plan.frameworks]
    over = (mpi.implementation, mpi.version) if mpi else ("", "")
    return gloo + [Check(framework, "mpi", *over, nccl=nccl) for framework in plan.frameworks if mpi]


def is_done(plan: Plan, record: Record | None) -> bool:
    """Say whether the installed Horovod is this plan's and has passed its checks."""
    return record is not None and record.key == plan.key and {str(c) for c in checks_of(plan)} <= set(record.checked)


def is_only_unchecked(plan: Plan, record: Record | None) -> bool:
    """Say whether the right Horovod is installed but did not pass its checks yet."""
    return record is not None and record.key == plan.key and not is_done(plan, record)


def difference(old: str, new: str) -> str:
    """Say what changed between two keys.

    >>> difference("horovod-0.28.1_cp311_torch-2.12.0", "horovod-0.28.1_cp311_torch-2.13.0")
    'torch-2.12.0 -> torch-2.13.0'
    """
    before, after = old.split("_"), new.split("_")
    gone = ", ".join(part for part in before if part not in after) or "nothing"
    come = ", ".join(part for part in after if part not in before) or "nothing"
    return f"{gone} -> {come}"


def failure(what: str, log: Path) -> BuildError:
    """Turn a log into the few lines that matter."""
    finding = diagnose(log.read_text(errors="replace"))
    hint = [f"What to do: {finding.hint}"] if finding.hint else []
    return BuildError("\n".join([f"{what}. The first error is:", f"  {finding.error}", *hint, f"Full log: {log}"]))


def check_message(check: Check, verdict: Verdict, log: Path) -> str:
    """Say that Horovod is installed but does not work."""
    return (
        f"Horovod is installed, but two ranks of {check} failed: {verdict.reason}\nWhat to do: where jobs "
        f"may not run (a login node), repeat this command inside a job; it will only check.\nFull log: {log}"
    )
