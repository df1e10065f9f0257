"""Runs compose.yaml where there is buildah but no container engine: every service on a network namespace of its own.

    sudo .venv/bin/python docker/compose_buildah.py

Knows what compose.yaml uses: image, hostname, command, one volume, healthcheck, and depends_on with conditions. Needs
what benchmarks/hosts.py needs, and `buildah`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from hosts import Host, Hosts, supported  # noqa: E402

Service = dict[str, Any]
OWNER = 10000  # the image's user
SECONDS = 1800.0  # for one service


def services(environ: dict[str, str]) -> dict[str, Service]:
    """Return the services in the order in which they stand, with ${NAME:-default} filled in."""
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: environ.get(m[1]) or m[2], (HERE / "compose.yaml").read_text())
    found: dict[str, Service] = yaml.safe_load(text)["services"]
    return found


class Project:
    """The hosts, a container for each service, and the folder that is their volume."""

    def __init__(self, hosts: Hosts, stack: ExitStack) -> None:
        self.hosts = hosts
        self.stack = stack
        self.containers: dict[str, str] = {}
        self.volume = hosts.folder / "volume"
        self.volume.mkdir(mode=0o700)
        os.chown(self.volume, OWNER, OWNER)

    def start(self, name: str, service: Service) -> subprocess.Popen[str]:
        """Start a service's command in a fresh container of its image."""
        made = subprocess.run(["buildah", "from", service["image"]], check=True, capture_output=True, text=True)
        self.containers[name] = made.stdout.split()[-1]
        self.stack.callback(subprocess.run, ["buildah", "rm", self.containers[name]], capture_output=True, check=False)
        self.stack.callback(self.hosts.end_all)  # comes first: callbacks are called last to first
        return self.execute(self.containers[name], service, service["command"])

    def execute(self, container: str, service: Service, command: list[str]) -> subprocess.Popen[str]:
        """Start a command in a container, on the network of a service's host."""
        host = self.host(service)
        target = service["volumes"][0].partition(":")[2]
        line = ["buildah", "run", "--hostname", host.name, "--volume", f"{self.volume}:{target}"]
        return self.hosts.popen(host, [*line, container, "--", *command])

    def host(self, service: Service) -> Host:
        """Return the host of a service's name; those without a name share the first one."""
        return next((host for host in self.hosts if host.name == service.get("hostname")), self.hosts[0])

    def wait_healthy(self, name: str, service: Service) -> None:
        """Repeat a service's health check until it passes, in the first container: buildah runs one program in each."""
        check = service["healthcheck"]
        idle = next(iter(self.containers.values()))
        for _ in range(check["retries"]):
            if self.execute(idle, service, check["test"][1:]).wait(SECONDS) == 0:
                return
            time.sleep(float(check["interval"].removesuffix("s")))
        raise SystemExit(f"{name} did not become healthy in {check['retries']} attempts")


def up(project: Project, wanted: dict[str, Service]) -> None:
    """Start the services one after another, each when those it depends on allow; the last one is waited for."""
    conditions = {n: c["condition"] for s in wanted.values() for n, c in s.get("depends_on", {}).items()}
    for name, service in wanted.items():
        print(f"{name}: {' '.join(service['command'])}", flush=True)
        running = project.start(name, service)
        if conditions.get(name) == "service_healthy":
            project.wait_healthy(name, service)
        elif code := running.wait(SECONDS):
            raise SystemExit(f"{name} ended with exit code {code}")


def main() -> None:
    """Make the hosts, run the services, clean up."""
    if reason := supported():
        raise SystemExit(f"compose_buildah: {reason}")
    with Hosts(2) as hosts, ExitStack() as stack:
        up(Project(hosts, stack), services(dict(os.environ)))


if __name__ == "__main__":
    main()
