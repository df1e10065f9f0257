"""Starts scenarios on several ranks, with a hard limit, and collects what every rank found."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
WORKER = HERE / "worker.py"

# Ways to start ranks: a name, the command before `python`, and what the environment needs.
ENGINES = ("horovodrun-gloo", "horovodrun-mpi", "mpirun", "mpirun-mpi4py")

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "HVDPLUS_TIMEOUT": "30",
}


def command(engine: str, ranks: int) -> list[str]:
    """The launcher's part of the command line."""
    if engine == "horovodrun-gloo":
        return [str(BIN / "horovodrun"), "--gloo", "-np", str(ranks)]
    if engine == "horovodrun-mpi":
        bind = "--bind-to none --map-by slot:OVERSUBSCRIBE"
        return [str(BIN / "horovodrun"), "--mpi", f"--binding-args={bind}", "-np", str(ranks)]
    return [_mpirun(), "-np", str(ranks), "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]


def _mpirun() -> str:
    own = BIN / "mpirun"
    return str(own) if own.exists() else "mpirun"


@dataclass
class Ended:
    """How a launch ended."""

    code: int | None
    output: str
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def result(self, name: str) -> list[Any]:
        """What each rank returned for a scenario; fails the test with the rank's own traceback if it raised."""
        found = []
        for rank, lines in enumerate(self.ranks):
            if name not in lines:
                pytest.fail(f"rank {rank} never finished {name} (exit {self.code}):\n{self.output[-12000:]}")
            if "error" in lines[name]:
                pytest.fail(f"rank {rank} in {name}:\n{lines[name]['error']}")
            found.append(lines[name]["result"])
        return found


def run(engine: str, ranks: int, argv: list[str], limit: float, **environment: str) -> Ended:
    """Run `python argv` on ranks; kill the launcher's own process group when the limit is over."""
    env = {**os.environ, **ENVIRONMENT, **environment, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    if engine == "mpirun-mpi4py":
        env.setdefault("HVDPLUS_ENGINE", "mpi")
    with tempfile.TemporaryFile("w+") as log:
        line = [*command(engine, ranks), sys.executable, *argv]
        process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return Ended(code, log.read())


@functools.cache
def scenarios(engine: str, ranks: int, module: str, limit: float = 480.0) -> Ended:
    """Run all scenarios of a module in one launch; the results are kept for the tests that ask for them."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run(engine, ranks, [str(WORKER), str(HERE / module), folder, str(limit - 20)], limit)
        for rank in range(ranks):
            path = Path(folder) / f"rank{rank}.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            ended.ranks.append({(entry := json.loads(line))["name"]: entry for line in lines})
    return ended


def names(module: str) -> list[str]:
    """The scenarios of a module, in the order in which they stand there."""
    text = (HERE / module).read_text()
    return [line[4 : line.index("(")] for line in text.splitlines() if line.startswith("def scenario_")]
