"""A plan laid out in memory: a bucket is one flat tensor with gradients as views, or the gradients where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from hvdplus.errors import StrategyError
from hvdplus.plan import Bucket, Parameter, Plan, plan
from hvdplus.reducer import Reducer
from hvdplus.strategy import Strategy
from hvdplus_torch._arrays import Pieces, TorchArrays, dtype_name

_EXCHANGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


NOTES = 4  # numbers that travel behind the usage flags


class Layout:
    """The memory of every bucket and the place of every parameter.

    A bucket's value is a flat buffer, into which gradients are copied, or ``Pieces``, gradients that stay where
    autograd left them: then nothing is copied, and there is no memory beside theirs. ``views`` are the gradients as
    parameters have them.

    Args:
        plan: the buckets.
        params: in the order of their indices.
        in_pieces: which buckets stay where they are, by index.
    """

    def __init__(self, plan: Plan, params: Sequence[torch.nn.Parameter], in_pieces: Sequence[int] = ()) -> None:
        self.plan, self._params = plan, params
        devices = dict(zip(places(params), (p.device for p in params), strict=True))
        self.values: list[torch.Tensor | Pieces] = [
            Pieces([member.count for member in bucket.members])
            if bucket.index in in_pieces
            else _buffer(bucket, devices[bucket.place])
            for bucket in plan.buckets
        ]
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(params)
        self.bucket_of: list[int | None] = [None] * len(params)
        self._piece_of: dict[int, int] = {}
        for bucket, value in zip(plan.buckets, self.values, strict=True):
            for number, member in enumerate(bucket.members):
                self.bucket_of[member.index] = bucket.index
                if isinstance(value, Pieces):
                    self._piece_of[member.index] = number
                    continue
                part = value[member.offset : member.offset + member.count]
                self.views[member.index] = shaped(part, params[member.index])
        self.release()

    @property
    def device(self) -> torch.device:
        """Where the first bucket is."""
        return self.values[0].device if self.values else torch.device("cpu")

    def take(self, index: int, grad: torch.Tensor) -> None:
        """Take in a dense gradient."""
        if index not in self._piece_of:
            self.views[index].copy_(grad)
        elif _lies_as(grad, self._params[index]):
            self._adopt(index, grad)
        else:
            self._adopt(index, _like(self._params[index]).copy_(grad))

    def clear(self, index: int) -> None:
        """Take zeros for a gradient."""
        if index in self._piece_of:
            self._adopt(index, _like(self._params[index]).zero_())
        else:
            self.views[index].zero_()

    def _adopt(self, index: int, grad: torch.Tensor) -> None:
        self.views[index] = grad
        numbers = torch.view_as_real(grad) if grad.is_complex() else grad
        bucket = self.bucket_of[index]
        assert bucket is not None
        value = self.values[bucket]
        assert isinstance(value, Pieces)
        value.tensors[self._piece_of[index]] = numbers.as_strided((numbers.numel(),), (1,))

    def release(self) -> None:
        """Let go of gradients that are not ours, as soon as nothing will be done with them."""
        for value in self.values:
            if isinstance(value, Pieces):
                value.clear()
        for index in self._piece_of:
            p = self._params[index]
            self.views[index] = p.new_empty(()).expand(p.shape)

    def own(self) -> None:
        """Give gradients that share their memory with others new memory, before means are written there.

        Autograd hands out one result under several names, as for ``a.view(-1) + b.view(-1)``.
        """
        for value in self.values:
            if isinstance(value, Pieces):
                value.clear()
        for index in self._piece_of:
            self._adopt(index, self._own(index))

    def _own(self, index: int, keep: bool = False) -> torch.Tensor:
        """Return a gradient that is alone in its memory, else new memory for it; ``keep`` copies its numbers."""
        grad = self.views[index]
        if _is_alone(grad):
            return grad
        return _like(self._params[index]).copy_(grad) if keep else _like(self._params[index])

    def scale(self, bucket: int, factor: float) -> None:
        """Multiply a bucket's numbers, but for its notes."""
        value = self.values[bucket]
        if isinstance(value, Pieces):
            value.clear()
            for member in self.plan.buckets[bucket].members:
                self._adopt(member.index, self._own(member.index, keep=True))
            numbers = value.tensors
        else:
            numbers = [value[:-NOTES] if bucket == len(self.values) - 1 else value]
        for part in numbers:
            if factor == 0.0:
                part.zero_()  # a product would keep a NaN
            else:
                part.mul_(factor)

    def send(self, bucket: int) -> torch.Tensor:
        """Return a bucket's value; to a reducer that was told so, pieces are a tensor like any other."""
        return cast("torch.Tensor", self.values[bucket])

    def receive(self, bucket: int, mean: torch.Tensor) -> None:
        """Put a bucket's mean where its gradients are, if it is not there."""
        value = self.values[bucket]
        if isinstance(value, Pieces):
            if mean is not cast("torch.Tensor", value):
                for piece, part in zip(value.tensors, mean.split(value.sizes), strict=True):
                    piece.copy_(part)
        elif mean.data_ptr() != value.data_ptr():
            value.copy_(mean)

    @property
    def _last(self) -> torch.Tensor:
        """The last bucket; it is exact, so it lies in one buffer."""
        value = self.values[-1]
        assert isinstance(value, torch.Tensor)
        return value

    @property
    def lossy(self) -> bool:
        """Whether there is a codec that may keep what it loses."""
        return any(bucket.codec != "exact" for bucket in self.plan.buckets)

    @property
    def flags(self) -> torch.Tensor:
        """The usage flags, one a parameter, near the end of the last bucket."""
        return self._last[self.plan.buckets[-1].flags_offset : -NOTES]

    @property
    def notes(self) -> torch.Tensor:
        """The notes behind them."""
        return self._last[-NOTES:]


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
    """Plan and lay out the parameters, which are in the order of registration.

    Buckets whose codecs read pieces are left in them, unless gradients have to be added up over micro-batches.
    """
    described = [describe(*entry) for entry in zip(names, params, places(params), strict=True)]
    planned = plan(described, strategy, NOTES)
    able = [bucket for bucket in planned.buckets if Reducer.reads_pieces(bucket, strategy)]
    return Layout(planned, params, [b.index for b in able if strategy.accumulate == 1 and _on_host(b, params)])


def _on_host(bucket: Bucket, params: Sequence[torch.nn.Parameter]) -> bool:
    return TorchArrays().hosts(params[bucket.members[0].index].new_empty(0, dtype=getattr(torch, bucket.dtype)))


def _lies_as(grad: torch.Tensor, p: torch.nn.Parameter) -> bool:
    """Whether a gradient's numbers lie in memory as those of all ranks do, and nothing but numbers is kept in it."""
    dense = grad.stride() == p.stride() if _is_dense(p) else grad.is_contiguous()
    return dense and grad.shape == p.shape and not (grad.requires_grad or grad.is_conj() or grad.is_neg())


def _like(p: torch.nn.Parameter) -> torch.Tensor:
    """Return new memory for a gradient of ``p``."""
    if _is_dense(p):
        return torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=p.device)
    return torch.empty(p.shape, dtype=p.dtype, device=p.device)


def _is_alone(grad: torch.Tensor) -> bool:
    """Whether no other tensor shares this one's memory."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and count(grad.untyped_storage()._cdata) <= _ALONE


def _users() -> int:
    """Return how often the memory of a gradient is counted when ``_is_alone`` looks at it."""
    layout_of_one = [torch.zeros(2)]
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(layout_of_one[0].untyped_storage()._cdata))


_ALONE = _users()


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
