"""Runs other programs: with every line seen and logged, or with a time limit that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GRACE_SECONDS = 5.0


def run_logged(command: Sequence[str], environ: Mapping[str, str], log: Path, on_line: Callable[[str], None]) -> int:
    """Run a command, appending its output to `log` and handing each line to `on_line`; return its status."""
    with (
        log.open("a") as file,
        subprocess.Popen(
            list(command),
            env=dict(environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        ) as child,
    ):
        file.write(f"$ {' '.join(command)}\n")
        assert child.stdout is not None
        for line in child.stdout:
            file.write(line)
            on_line(line.rstrip("\n"))
    return child.returncode


@dataclass(frozen=True)
class Finished:
    """How a limited run ended; `status` is None if the time was up."""

    status: int | None
    output: str


def run_limited(command: Sequence[str], environ: Mapping[str, str], seconds: float) -> Finished:
    """Run a command in a process group of its own and end that group when the time is up."""
    child = subprocess.Popen(
        list(command),
        env=dict(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text, _ = child.communicate(timeout=seconds)
        return Finished(child.returncode, text)
    except subprocess.TimeoutExpired:
        return Finished(None, end(child))
    finally:
        if child.poll() is None:  # interrupted by the user
            end(child)


def end(child: subprocess.Popen[str]) -> str:
    """End a child's process group, gently first so that launchers end their ranks; return its output."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return child.communicate(timeout=GRACE_SECONDS)[0] or ""
    return ""
