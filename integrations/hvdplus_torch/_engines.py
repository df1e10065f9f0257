"""The collectives on torch tensors: Horovod's, and a bridge that lends host engines the tensor's own memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from hvdplus.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collectives,
    Mapped,
    Pending,
    Ready,
    Request,
)
from hvdplus.engines import built_for
from hvdplus.world import World


def horovod() -> Any:
    """Return the module ``horovod.torch``."""
    import horovod.torch

    return horovod.torch


def horovod_serves(world: World) -> bool:
    """Whether Horovod is built for torch and can join what this launcher started."""
    try:
        hvd = horovod()
        gloo, mpi = bool(hvd.gloo_built()), bool(hvd.mpi_built())
    except (ImportError, AttributeError, OSError):  # absent, built without torch, or for another version of it
        return False
    return built_for(world, gloo, mpi)


def start_horovod(*args: Any, **kwargs: Any) -> HorovodCollectives:
    """Initialise Horovod with its own arguments."""
    horovod().init(*args, **kwargs)
    return HorovodCollectives()


@dataclass
class _Flying:
    """A Horovod handle and the shape its answer is to have."""

    handle: int
    shape: tuple[int, ...]

    def done(self) -> bool:
        """Poll Horovod's background thread."""
        return bool(horovod().poll(self.handle))

    def result(self) -> torch.Tensor:
        """Wait, and reshape."""
        answer = horovod().synchronize(self.handle)
        answer = answer[0] if isinstance(answer, tuple) else answer
        return answer.view(self.shape)  # type: ignore[no-any-return]


@dataclass
class _Swapped:
    """Two ranks' messages, gathered as a sum: each takes its own off. Whole numbers wrap without loss."""

    handle: int
    mine: torch.Tensor
    rank: int

    def done(self) -> bool:
        """Poll Horovod's background thread."""
        return bool(horovod().poll(self.handle))

    def result(self) -> torch.Tensor:
        """Wait, and tell the messages apart."""
        other = _as_words(self.mine)
        torch.sub(horovod().synchronize(self.handle), other, out=other)
        rows = torch.empty((2, *self.mine.shape), dtype=self.mine.dtype)
        rows[self.rank] = self.mine
        rows[1 - self.rank] = other.view(torch.uint8)[: self.mine.nbytes].view(self.mine.dtype).view(self.mine.shape)
        return rows


def _as_words(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of the memory of ``value`` as int32, zeros at the end."""
    words = torch.zeros(-(-value.nbytes // 4), dtype=torch.int32)
    words.view(torch.uint8)[: value.nbytes] = value.contiguous().view(-1).view(torch.uint8)
    return words


class HorovodCollectives:
    """Horovod among the ranks of one process set. It matches collectives by name."""

    def __init__(self, process_set: Any = None) -> None:
        self._hvd = horovod()
        self._set = process_set or self._hvd.global_process_set
        self.rank: int = self._set.rank()
        self.size: int = self._set.size()
        self.label = f"set{self._set.process_set_id}"
        # Gloo gathers in one direction after the other, and sums in both at once: in half the time.
        self._swaps = self.size == 2 and not self._hvd.mpi_enabled()

    def own(self) -> Pending[HorovodCollectives]:
        """Return itself: names tell its users apart."""
        return Ready(self)

    def sums(self, value: torch.Tensor, dtype: str) -> bool:
        """Horovod refuses bf16; its fp16 sum on a CPU is slow software that rounds at every step."""
        return dtype != "bfloat16" and (dtype != "float16" or value.is_cuda)

    def start(self, request: Request[torch.Tensor], name: str) -> Pending[torch.Tensor]:
        """Hand ``request`` to Horovod's background thread."""
        hvd, value, options = self._hvd, request.value.contiguous(), {"name": name, "process_set": self._set}
        shape = tuple(value.shape)
        if isinstance(request, AllReduce):
            handle = hvd.allreduce_async_(value, op=hvd.Sum, prescale_factor=request.scale, **options)
        elif isinstance(request, AllGather) and self._swaps and not value.is_cuda and value.dim() and value.numel():
            handle = hvd.allreduce_async_(_as_words(value), op=hvd.Sum, **options)
            return _Swapped(handle, value, self.rank)
        elif isinstance(request, AllGather):
            handle, shape = hvd.allgather_async(value, **options), (self.size, *shape)
        elif isinstance(request, AllToAll):
            handle = hvd.alltoall_async(value, **options)
        elif isinstance(request, Broadcast):
            handle = hvd.broadcast_async_(value, self._global_rank(request.root), **options)
        else:
            handle = hvd.reducescatter_async(value, op=hvd.Sum, prescale_factor=request.scale, **options)
            shape = shape[1:]
        return _Flying(handle, shape)

    def _global_rank(self, root: int) -> int:
        ranks = self._set.ranks
        return int(ranks[root]) if ranks else root


class HostBridge:
    """A host engine for tensors: CPU tensors lend their memory, device tensors are copied."""

    def __init__(self, inner: Collectives[Any]) -> None:
        self.inner = inner
        self.rank, self.size, self.label = inner.rank, inner.size, inner.label

    def own(self) -> Pending[HostBridge]:
        """Ask the host engine."""
        return Mapped(self.inner.own(), HostBridge)

    def sums(self, value: torch.Tensor, dtype: str) -> bool:
        """Ask the host engine."""
        return self.inner.sums(value, dtype)

    def start(self, request: Request[torch.Tensor], name: str) -> Pending[torch.Tensor]:
        """Post ``request`` on host memory."""
        value, device = request.value.detach().contiguous(), request.value.device
        host = value.cpu().numpy()
        lent: Request[Any] = replace(request, value=host)  # type: ignore[arg-type]
        return Mapped(self.inner.start(lent, name), lambda array: torch.from_numpy(array).to(device))
