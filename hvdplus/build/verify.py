"""Checks an installed Horovod: two ranks add up numbers, in each framework and over each transport."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdplus.build.diagnose import PIP_ERROR, PYTHON_ERROR
from hvdplus.build.process import Finished, run_limited
from hvdplus.build.versions import release

SECONDS = 240.0
MARK = "hvdplus-check-passed"

# What each rank runs, with the transport and `nccl` or `host` as arguments. Asking `..._enabled()` guards
# against a launcher that quietly falls back to the other transport.
COMMON = f"""
transport, place = sys.argv[1:]
hvd.init()
assert hvd.size() == 2, f"size is {{hvd.size()}}, not 2"
assert getattr(hvd, transport + "_enabled")(), "the ranks do not talk over " + transport
total = hvd.allreduce(ones() * (hvd.rank() + 1), op=hvd.Sum, name="check")
assert [float(x) for x in total] == [3.0] * 5, f"1 + 2 gave {{total}}"
print("{MARK}", flush=True)
hvd.shutdown()
"""
TORCH = """
import sys, torch, horovod.torch as hvd
def ones():
    on_gpu = place == "nccl" and torch.cuda.device_count() >= 2
    return torch.ones(5, device=f"cuda:{hvd.local_rank()}" if on_gpu else "cpu")
"""
TENSORFLOW = """
import sys, tensorflow as tf, horovod.tensorflow as hvd
def ones():
    return tf.ones(5)
"""
PROGRAMS = {"torch": TORCH + COMMON, "tensorflow": TENSORFLOW + COMMON}


@dataclass(frozen=True)
class Check:
    """One framework over one transport."""

    framework: str
    transport: str
    implementation: str = ""
    version: str = ""
    nccl: bool = False

    def __str__(self) -> str:
        return f"{self.framework} over {self.transport}"


@dataclass(frozen=True)
class Verdict:
    """How a check went; `reason` is one line if it failed."""

    passed: bool
    reason: str = ""
    output: str = ""


def launch_command(check: Check, python: str, script: str) -> list[str]:
    """Return the command that starts two ranks, by `horovodrun` wherever that works."""
    ranks = ["-np", "2", python, script, check.transport, "nccl" if check.nccl else "host"]
    if check.transport == "mpi" and check.implementation != "openmpi":
        return ["mpirun", *ranks]
    how = ["--gloo"] if check.transport == "gloo" else ["--mpi", *binding(check.version)]
    return [python, "-m", "horovod.runner.launch", *how, *ranks]


def binding(version: str) -> list[str]:
    """Return the option without which horovodrun fails with Open MPI 5, which reads `-bind-to` as letters."""
    return ["--binding-args=--bind-to none --map-by slot"] if release(version) >= (5,) else []


def check_environment(environ: Mapping[str, str], path: str, root: bool) -> dict[str, str]:
    """Return the variables for a check; as root, Open MPI wants to be told twice that it may run."""
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT")
    allow = {f"{name}{suffix}": "1" for name in names for suffix in ("", "_CONFIRM")} if root else {}
    return {**environ, "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **allow}


def run_check(check: Check, python: str, path: str, seconds: float = SECONDS) -> Verdict:
    """Run one check within a time limit."""
    environ = check_environment(os.environ, path, root=os.geteuid() == 0)
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "check.py"
        script.write_text(PROGRAMS[check.framework])
        return judge(run_limited(launch_command(check, python, str(script)), environ, seconds), seconds)


def judge(finished: Finished, seconds: float) -> Verdict:
    """Decide from status and output; both ranks must have said that they passed."""
    if finished.status is None:
        return Verdict(False, f"the two ranks did not finish within {seconds:.0f} s", finished.output)
    if finished.status == 0 and finished.output.count(MARK) == 2:
        return Verdict(True, output=finished.output)
    return Verdict(False, reason(finished), finished.output)


def reason(finished: Finished) -> str:
    """Return the line of the output that says most."""
    lines = [line.split(">:")[-1].split("<stderr>")[-1].strip() for line in finished.output.splitlines()]
    telling = [line for line in lines if PYTHON_ERROR.match(line) or PIP_ERROR.match(line)]
    return next(iter(telling or [line for line in reversed(lines) if line]), f"exit status {finished.status}")
