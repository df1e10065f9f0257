"""The session of this process in torch: ``init()``, ``shutdown()`` and the questions about ranks."""

from __future__ import annotations

from typing import TypeAlias

import torch

from hvdplus import session as core
from hvdplus.collectives import Broadcast, Collectives
from hvdplus_torch._engines import HostBridge, horovod, horovod_serves, start_horovod

Session: TypeAlias = core.Session[torch.Tensor]

FRAMEWORK = core.Framework(
    name="torch",
    lend=torch.from_numpy,
    read=lambda tensor: tensor.cpu().numpy(),
    host=HostBridge,
    horovod=start_horovod,
    horovod_serves=horovod_serves,
    horovod_stop=lambda: horovod().shutdown(),
)

_HOLDER = core.Holder(FRAMEWORK)
init, shutdown, is_initialized = _HOLDER.init, _HOLDER.shutdown, _HOLDER.is_initialized
session, rank, size = _HOLDER.session, _HOLDER.rank, _HOLDER.size


def local_rank() -> int:
    """Return the rank among the ranks on this host."""
    return session().world.local_rank or 0


def local_size() -> int:
    """Return the number of ranks on this host."""
    return session().world.local_size or 1


def cross_rank() -> int:
    """Return the number of this host among the hosts that have a rank of this local rank."""
    return session().cross[0]


def cross_size() -> int:
    """Return the number of hosts that have a rank of this local rank."""
    return session().cross[1]


def device() -> torch.device:
    """Return this rank's own device: its GPU by local rank (also where it sees only one), else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", local_rank() % count) if count else torch.device("cpu")


def broadcast(
    current: Session, tensor: torch.Tensor, root: int, name: str, collectives: Collectives[torch.Tensor] | None = None
) -> None:
    """Overwrite ``tensor``, of any dtype and layout, with ``root``'s; ``name`` is the same on all ranks."""
    among = collectives or current.collectives
    if among.size == 1 or tensor.numel() == 0:
        return
    flat = tensor.detach().contiguous().reshape(-1).clone()
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    pending = among.start(Broadcast(real.reshape(-1).view(torch.uint8), root), f"hvdplus.broadcast.{name}")
    answer = current.watch.wait(pending).view(real.dtype).view(real.shape)
    whole = torch.view_as_complex(answer) if flat.is_complex() else answer
    with torch.no_grad():
        tensor.copy_(whole.view(tensor.shape))
