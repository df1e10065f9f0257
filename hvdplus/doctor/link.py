"""Starts two ranks across hosts, as `hvdplus run` would, and collects what they measured of the way between them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvdplus.build.diagnose import PYTHON_ERROR
from hvdplus.build.process import Finished, run_limited
from hvdplus.doctor.finding import Finding
from hvdplus.doctor.pingpong import MARK, Row
from hvdplus.errors import LaunchError
from hvdplus.launch.hosts import Host, is_local, listed, parse_hosts, total
from hvdplus.launch.line import Job, environment, make_line
from hvdplus.launch.site import Site

LINK = "README.md#no-connection-between-hosts"
SECONDS = 120.0
_LONGEST = 300  # letters of a complaint
_WORDS = {"mpi": "MPI (mpi4py)", "tcp": "plain TCP"}


@dataclass(frozen=True)
class Measured:
    """How it went, and the rows of the table; none where it went wrong."""

    finding: Finding
    rows: tuple[Row, ...] = ()


Run = Callable[[Sequence[str], Mapping[str, str], float], Finished]


def measure_link(site: Site, text: str, run: Run = run_limited) -> Measured:
    """Measure between the two hosts of ``text``, as in ``boxa,boxb``.

    Raises:
        LaunchError: the text does not name two places for ranks.
    """
    hosts = parse_hosts(text, "--hosts")
    if total(hosts) != 2:
        raise LaunchError(f"--hosts {text} names {total(hosts)} places for ranks, not two; write boxa,boxb or boxa:2.")
    try:
        return _measured(site, hosts, run)
    except LaunchError as error:
        return Measured(_finding("bad", f"{listed(hosts)}: {str(error).rstrip('.')}", "see 'hvdplus run --help'"))


def _measured(site: Site, hosts: tuple[Host, ...], run: Run) -> Measured:
    job = Job((sys.executable, "-m", "hvdplus.doctor.pingpong"), 2, hosts, allow_root=True)
    launcher = make_line(site, job).launcher
    way = "mpi" if launcher != "horovodrun-gloo" and site.mpi4py else "tcp"
    first = "127.0.0.1" if is_local(hosts, site.host) else hosts[0].name
    words = (*job.command, way, first, str(_free_port()))
    line = make_line(site, Job(words, 2, hosts, allow_root=True))
    environ = environment(line, {**os.environ, "OMP_NUM_THREADS": "1"})
    argv = [shutil.which(line.argv[0], path=environ["PATH"]) or line.argv[0], *line.argv[1:]]
    return judge(run(argv, environ, SECONDS), f"{listed(hosts)} by {launcher}, {_WORDS[way]}")


def judge(finished: Finished, where: str) -> Measured:
    """Read the table out of what the ranks printed, among what their launcher added to it."""
    for text in finished.output.splitlines():
        if MARK in text and finished.status == 0:
            rows = tuple(Row(**row) for row in json.loads(text.split(MARK, 1)[1]))
            return Measured(_finding("ok", f"two ranks on {where}: {_summary(rows)}", ""), rows)
    late = f"the two ranks did not end within {SECONDS:.0f} s"
    what = late if finished.status is None else complaint(finished)
    return Measured(_finding("bad", f"{where}: {what}", "see whether ssh, names and firewalls let the hosts talk"))


def complaint(finished: Finished) -> str:
    """Return what a launcher or a rank said: an exception's line, else the first paragraph, for MPIs write such."""
    lines = [line.split(">:")[-1].strip() for line in finished.output.splitlines()]
    raised = [line for line in lines if PYTHON_ERROR.match(line)]
    said = [line if re.search(r"\w", line) else "" for line in lines]  # rulers part paragraphs, too
    paragraphs = " ".join(line or "\n" for line in said).split("\n")
    first = next((text.strip() for text in paragraphs if text.strip()), f"exit status {finished.status}")
    return raised[0] if raised else first[:_LONGEST]


def _summary(rows: tuple[Row, ...]) -> str:
    rate = rows[-1].megabytes_a_second  # of the largest messages: gradients travel in such
    return f"{rows[0].microseconds:,.0f} us, {rate:,.0f} MB/s ({rate * 8 / 1000:,.1f} Gbit/s)"


def _finding(status: str, what: str, fix: str) -> Finding:
    return Finding("hosts", "ok" if status == "ok" else "bad", what, fix, LINK)


def _free_port() -> int:
    """Return a port that is free here; on the first host it most likely is, too."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
