"""A rank of the exchange benchmark in PyTorch: hvdplus, Horovod and DDP, all on one way from backward to the means."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from gradients import WORK, Gradients, Shape, fingerprint
from protocol import GROUP, Contender, serve
from torch import distributed

import hvdplus

WHOLE_MODEL_MB = 1 << 20  # a bucket that holds any model


class Hand(torch.autograd.Function):
    """Costs nothing: its backward hands a prepared gradient to the parameter, and autograd keeps it without a copy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: torch.Tensor, ready: list[torch.Tensor]) -> torch.Tensor:
        """Pass `x` on; parameters take their gradients from the end of `ready`, the last one first."""
        ctx.ready = ready
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Give up the list's own reference with the gradient, so that autograd may take it over."""
        return grads[0], ctx.ready.pop(), None


class Network(torch.nn.Module):
    """Has parameters of given shapes, whose gradients are those in `ready`."""

    def __init__(self, shapes: list[Shape]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.ready: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar that depends on every parameter, so that backward reaches the last one first."""
        for p in self.weights:
            x = Hand.apply(x, p, self.ready)  # type: ignore[no-untyped-call]
        return x


class Still(torch.optim.Optimizer):
    """An optimizer that leaves parameters alone: what is measured is how gradients get there."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class Exchange:
    """One contender on one rank: a network, its optimizer, and the gradients of every step."""

    def __init__(self, network: Network, forward: Callable[..., Any], optimizer: Any, gradients: Gradients) -> None:
        self.network, self.forward, self.optimizer, self.gradients = network, forward, optimizer, gradients
        self._loss = torch.empty(0)

    def prepare(self, step: int) -> None:
        """Make fresh gradients, and the graph that will hand them out."""
        self.optimizer.zero_grad()
        self.network.ready.extend(map(torch.from_numpy, self.gradients.fresh(step)))
        self._loss = self.forward(torch.zeros((), requires_grad=True))

    def exchange(self) -> None:
        """Do what every training loop does."""
        self._loss.backward()
        self.optimizer.step()

    def sample(self) -> list[float]:
        """Return what tells all means from others."""
        return fingerprint([p.grad.numpy() for p in self.network.weights if p.grad is not None])

    def counted(self) -> dict[str, Any]:
        """Return hvdplus' statistics, and the codec that was in force."""
        ours = getattr(self.optimizer, "hvdplus", None)
        return {**ours.stats(), "codec": ours.strategy.codec} if ours else {}


def contender(name: str, work: str, rank: int) -> Contender:
    """Set up a contender; the one before is gone, with all its memory."""
    gc.collect()
    library, _, codec = name.split("/", 2)
    shapes = WORK[work]()
    network = Network(shapes)
    forward, optimizer = LIBRARIES[library](network, codec)
    return Exchange(network, forward, optimizer, Gradients(shapes, rank))


def plain(network: Network, _: str) -> tuple[Callable[..., Any], Any]:
    """Exchange nothing, in one process, to compare memory with."""
    return network, Still(network.parameters())


def ours(network: Network, codec: str) -> tuple[Callable[..., Any], Any]:
    """Wrap with any strategy of ours; names alone, since copying parameters is not what is measured."""
    still = Still(network.parameters())
    return network, hvdplus.wrap(still, named_parameters=network.named_parameters(), strategy=codec)


def horovod(network: Network, codec: str) -> tuple[Callable[..., Any], Any]:
    """Take Horovod's own optimizer."""
    import horovod.torch as hvd

    compression = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}[codec]
    named = network.named_parameters()
    return network, hvd.DistributedOptimizer(Still(network.parameters()), named, compression=compression)


def ddp(network: Network, codec: str) -> tuple[Callable[..., Any], Any]:
    """Take PyTorch's DistributedDataParallel; its PowerSGD hook needs all gradients in one bucket on Gloo."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    hook, _, rank = codec.partition(":")
    bucket = WHOLE_MODEL_MB if hook == "powersgd" else None
    model = DistributedDataParallel(network, bucket_cap_mb=bucket, init_sync=False)
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, int(rank), start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook != "none":
        raise ValueError(f"ddp has no hook {hook!r} here; it has none, fp16 and powersgd:RANK")
    return model, Still(network.parameters())


LIBRARIES = {"plain": plain, "hvdplus": ours, "horovod": horovod, "ddp": ddp}


def join(group: str) -> tuple[int, int]:
    """Join the other ranks as a group's library does; return this rank and how many there are."""
    if group == "plain":
        return 0, 1
    if group == "ddp":
        distributed.init_process_group("gloo")
        return distributed.get_rank(), distributed.get_world_size()
    if group.startswith("stock"):
        import horovod.torch as hvd
    else:
        import hvdplus.torch as hvd
    hvd.init()
    return hvd.rank(), hvd.size()


def main() -> None:
    """Join, then serve the driver."""
    rank, size = join(os.environ[GROUP])
    serve(rank, size, lambda name, work: contender(name, work, rank))


if __name__ == "__main__":
    main()
