"""A plan laid out in memory: one flat tensor a bucket, and each parameter's gradient as a view into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdplus.errors import StrategyError
from hvdplus.plan import Bucket, Parameter, Plan, plan
from hvdplus.strategy import Strategy
from hvdplus_torch._arrays import dtype_name

_EXCHANGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


NOTES = 3  # numbers that travel behind the usage flags


class Layout:
    """Buffers, views and the place of every parameter, for the parameters at ``indices``."""

    def __init__(self, plan: Plan, params: Sequence[torch.nn.Parameter]) -> None:
        self.plan = plan
        devices = dict(zip(places(params), (p.device for p in params), strict=True))
        self.buffers = [_buffer(bucket, devices[bucket.place]) for bucket in plan.buckets]
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(params)
        self.bucket_of: list[int | None] = [None] * len(params)
        for bucket, buffer in zip(plan.buckets, self.buffers, strict=True):
            for member in bucket.members:
                part = buffer[member.offset : member.offset + member.count]
                self.views[member.index] = shaped(part, params[member.index])
                self.bucket_of[member.index] = bucket.index

    @property
    def lossy(self) -> bool:
        """Whether there is a codec that may keep what it loses."""
        return any(bucket.codec != "exact" for bucket in self.plan.buckets)

    @property
    def flags(self) -> torch.Tensor:
        """The usage flags, one a parameter, near the end of the last bucket."""
        return self.buffers[-1][self.plan.buckets[-1].flags_offset : -NOTES]

    @property
    def notes(self) -> torch.Tensor:
        """The notes behind them."""
        return self.buffers[-1][-NOTES:]


def places(params: Sequence[torch.nn.Parameter]) -> list[str]:
    """Name each parameter's device in a way that is the same on all ranks: its kind, and which of those used here."""
    seen: list[torch.device] = []
    for p in params:
        if p.device not in seen:
            seen.append(p.device)
    return [f"{p.device.type}#{seen.index(p.device)}" for p in params]


def check_shape(name: str, p: torch.nn.Parameter) -> None:
    """Refuse a lazy parameter.

    Raises:
        StrategyError: it has no shape yet.
    """
    if p.is_meta:
        raise StrategyError(f"parameter {name!r} is on the meta device; give the model its weights before wrapping.")
    if torch.nn.parameter.is_lazy(p):
        raise StrategyError(
            f"parameter {name!r} is not initialised; run one forward pass of the model before wrapping."
        )


def describe(name: str, p: torch.nn.Parameter, place: str) -> Parameter:
    """Say of a parameter what the plan and the other ranks need to know.

    Raises:
        StrategyError: its dtype cannot be exchanged.
    """
    if p.dtype not in _EXCHANGED:
        allowed = ", ".join(dtype_name(dtype) for dtype in _EXCHANGED)
        raise StrategyError(
            f"parameter {name!r} has dtype {dtype_name(p.dtype)}, which cannot be exchanged; allowed are {allowed}."
        )
    return Parameter(name, tuple(p.shape), dtype_name(p.dtype), place, strides(p))


def lay_out(names: Sequence[str], params: Sequence[torch.nn.Parameter], strategy: Strategy) -> Layout:
    """Plan and lay out the parameters, which are in the order of registration."""
    described = [describe(*entry) for entry in zip(names, params, places(params), strict=True)]
    return Layout(plan(described, strategy, NOTES), params)


def _buffer(bucket: Bucket, device: torch.device) -> torch.Tensor:
    return torch.zeros(bucket.count, dtype=getattr(torch, bucket.dtype), device=device)


def _is_dense(p: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in whatever order (channels_last)."""
    expected = 1
    for stride, length in sorted(zip(p.stride(), p.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def shaped(part: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """View flat numbers in ``p``'s shape, and with its own strides where they are dense."""
    if p.is_complex():
        part = torch.view_as_complex(part.view(-1, 2))
    return part.as_strided(p.shape, p.stride()) if _is_dense(p) else part.view(p.shape)


def numbers(p: torch.Tensor) -> int:
    """Return how many real numbers ``p`` has."""
    return p.numel() * (2 if p.is_complex() else 1)


def strides(p: torch.Tensor) -> tuple[int, ...]:
    """Return how ``p`` lies in memory; nothing where it does not fill it, and its gradient is contiguous."""
    return tuple(p.stride()) if _is_dense(p) else ()
