"""Checks of the host: its name, its network, shared and locked memory, its GPUs."""

from __future__ import annotations

import re

from hvdplus.doctor.finding import Verdict, bad, ok, warn
from hvdplus.doctor.machine import Machine
from hvdplus.errors import LaunchError
from hvdplus.world import discover

MIB = 2**20
# Docker's own /dev/shm has 64 MiB. Beside the ranks' own segments, a data loader's workers keep whole batches there.
SHM_ENOUGH = 512 * MIB
_NAMES_INTERFACES = ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def host_name(machine: Machine) -> Verdict:
    """Say what the host's own name resolves to, which is where Gloo listens."""
    host, addresses = machine.site.host, machine.addresses
    if not addresses:
        return bad(f"the host name {host} does not resolve: ranks over Gloo crash", f"add {host} to /etc/hosts")
    shown = ", ".join(addresses)
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        return warn(
            f"the host name {host} resolves to {shown}: fine alone, but Gloo between hosts gets 'Connection refused'",
            f"in /etc/hosts, give {host} the address that other hosts reach it by",
        )
    return ok(f"{host} resolves to {shown}")


def interfaces(machine: Machine) -> Verdict:
    """Say which network interfaces are there, and which one is routed."""
    outward = [each for each in machine.interfaces if not each.address.startswith("127.")]
    names = [each.name for each in machine.interfaces]
    wrong = [f"{name}={value}" for name, value in _named(machine) if not _exists(value, names)]
    if wrong:
        return bad(f"{', '.join(wrong)} names no interface; there are {', '.join(names)}", "correct or unset it")
    if not outward:
        return warn("no network interface but loopback: ranks on this host only", "bring a network up for more hosts")
    shown = ", ".join(f"{each.name} {each.address}" for each in outward)
    routed = f"; {machine.routed} is routed" if machine.routed else "; none is routed"
    if len(outward) > 1 and not _named(machine):
        best = machine.routed or outward[0].name
        return warn(
            f"several interfaces ({shown}{routed}), of which a launcher may take a wrong one",
            f"for several hosts: horovodrun --network-interfaces {best}, NCCL_SOCKET_IFNAME={best}",
        )
    return ok(f"{shown}{routed}")


def _named(machine: Machine) -> list[tuple[str, str]]:
    environ = machine.site.environ
    return [(name, environ[name]) for name in _NAMES_INTERFACES if environ.get(name)]


def _exists(value: str, names: list[str]) -> bool:
    """Read a value as NCCL does: a list of beginnings, of exact names after ``=``, of what to leave out after ``^``."""
    if value.startswith("^"):
        return True
    exact = value.startswith("=")
    wanted = re.split(r"[,:]", value.removeprefix("="))
    return any(name == each if exact else name.startswith(each) for each in wanted for name in names)


def shared_memory(machine: Machine) -> Verdict:
    """Say whether /dev/shm is big enough for ranks, NCCL and data loaders."""
    size = machine.shm_bytes
    fix = "docker run --shm-size=2g, or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm"
    if size is None:
        return bad("there is no /dev/shm, through which ranks of one host exchange", fix)
    if size < SHM_ENOUGH:
        return warn(f"/dev/shm has {size // MIB} MiB: NCCL and data loaders end with a bus error when it is full", fix)
    return ok(f"/dev/shm has {_size(size)}")


def locked_memory(machine: Machine) -> Verdict | None:
    """Say whether InfiniBand may lock the memory it sends from."""
    if not machine.infiniband:
        return None
    devices = ", ".join(machine.infiniband)
    if machine.memlock_bytes is None:
        return ok(f"{devices}, and memory may be locked without limit")
    return warn(
        f"ulimit -l is {_size(machine.memlock_bytes)}, but {devices} can only send memory that is locked",
        "ulimit -l unlimited; docker run --ulimit memlock=-1; for jobs, in the batch system's own service",
    )


def gpus(machine: Machine) -> Verdict | None:
    """Compare GPUs with PyTorch's build, the ranks on this host, and what Horovod exchanges them with."""
    cuda = machine.torch.cuda if machine.torch else None
    count, visible = machine.gpus, machine.site.environ.get("CUDA_VISIBLE_DEVICES")
    if not count and not cuda:
        return None
    if not count:
        return warn(f"PyTorch is built for CUDA {cuda}, but no GPU is here", "docker run --gpus all, or a GPU node")
    if machine.torch and not cuda:
        return warn(f"{_gpus(count)}, but PyTorch is built for the CPU", "install PyTorch's CUDA build")
    if visible in ("", "-1"):
        return warn(f"{_gpus(count)}, hidden by CUDA_VISIBLE_DEVICES={visible!r}", "unset it")
    seen = min(count, len(visible.split(","))) if visible else count
    ranks = _local_ranks(machine)
    if ranks > seen > 1:
        return warn(f"{ranks} ranks on this host share {_gpus(seen)}", f"start {seen} ranks a host")
    if machine.site.horovod and not machine.site.horovod.nccl:
        return warn(
            f"{_gpus(count)}, but Horovod was built without NCCL: tensors travel through host memory",
            "hvdplus install-horovod --with-nccl",
        )
    return ok(f"{_gpus(count)}{', NCCL in Horovod' if machine.site.horovod else ''}")


def _local_ranks(machine: Machine) -> int:
    try:
        return discover(machine.site.environ).local_size or 1
    except LaunchError:  # the launcher's own check says so
        return 1


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def _size(count: int) -> str:
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count // MIB} MiB" if count >= MIB else f"{count // 1024} KiB"
