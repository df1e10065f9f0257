"""Copies parameters, optimizer state and objects from one rank to all."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hvdplus.collectives import Collectives
from hvdplus.errors import StrategyError
from hvdplus_torch._session import Session, broadcast, session

Params = Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]
Among = Collectives[torch.Tensor] | None


def broadcast_parameters(params: Params, root_rank: int = 0) -> None:
    """Overwrite tensors, of any dtype and layout, with those of ``root_rank``.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: the rank whose values all get.

    Raises:
        StrategyError: ``params`` is none of these.
    """
    named = _named(params)
    for name, tensor in named:
        broadcast(session(), tensor, root_rank, name)


def _named(params: Params) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, torch.Tensor | str | bytes) or not isinstance(params, Iterable):
        raise StrategyError(
            f"params is a {type(params).__name__}; pass model.state_dict(), model.named_parameters() or "
            f"model.parameters()."
        )
    entries = sorted(params.items()) if isinstance(params, Mapping) else params
    named = [entry if isinstance(entry, tuple) else (str(i), entry) for i, entry in enumerate(entries)]
    return [(name, tensor) for name, tensor in named if isinstance(tensor, torch.Tensor)]


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """Return ``root_rank``'s ``obj``, pickled and sent to all ranks (of a Horovod process set, if one is given)."""
    root = root_rank if process_set is None or not process_set.ranks else process_set.ranks.index(root_rank)
    return object_from(session(), obj, root, name or type(obj).__name__, _among(process_set))


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Return every rank's ``obj``, in rank order."""
    return [pickle.loads(text) for text in session().gather(pickle.dumps(obj), _among(process_set))]


def _among(process_set: Any) -> Among:
    if process_set is None:
        return None
    from hvdplus_torch._engines import HorovodCollectives

    return HorovodCollectives(process_set)


def object_from(current: Session, obj: Any, root: int, name: str, among: Among = None) -> Any:
    """Return ``root``'s ``obj``."""
    group = among or current.collectives
    if group.size == 1:
        return obj
    mine = group.rank == root
    payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8) if mine else torch.empty(0)
    length = torch.tensor([payload.numel()])
    broadcast(current, length, root, f"{name}.length", among)
    if not mine:
        payload = torch.empty(int(length), dtype=torch.uint8)
    broadcast(current, payload, root, f"{name}.object", among)
    return obj if mine else pickle.loads(payload.numpy().tobytes())


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None) -> None:
    """Give every rank ``root_rank``'s optimizer: options such as the learning rate, and all state.

    Works for any optimizer, before its first step and after; nothing is stepped. ``model`` is Horovod's argument and
    not needed.
    """
    optimizer_state_from(session(), optimizer, root_rank)


def optimizer_state_from(current: Session, optimizer: torch.optim.Optimizer, root: int, among: Among = None) -> None:
    """Send the structure as one object, then tensor after tensor, so that no second copy of all state is made."""
    group = among or current.collectives
    if group.size == 1:
        return
    state = plain_state(optimizer) if group.rank == root else {}
    tensors: list[torch.Tensor] = []
    skeleton = object_from(current, _without_tensors(state, tensors), root, "optimizer", among)
    if group.rank != root:
        tensors = [torch.empty(s.shape, dtype=s.dtype) for s in _slots(skeleton)]
    for index, tensor in enumerate(tensors):
        broadcast(current, tensor, root, f"optimizer.{index}", among)
    if group.rank != root:
        _plain_load(optimizer)(_with_tensors(skeleton, iter(tensors)))
    attached = getattr(optimizer, "hvdplus", None)
    if attached is not None and attached._exchanger.collectives.label == group.label:
        attached._exchanger.follow(root)


def plain_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state that the class itself knows of, which is to be equal on all ranks."""
    return type(optimizer).state_dict(optimizer)


def _plain_load(optimizer: torch.optim.Optimizer) -> Any:
    """The class's own method: a wrapped optimizer's would discard the window in which this happens."""
    return type(optimizer).load_state_dict.__get__(optimizer)


class _Slot:
    """A tensor's place in the structure."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


def _without_tensors(value: Any, found: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        found.append(value)
        return _Slot(value.shape, value.dtype)
    if isinstance(value, dict):
        return {key: _without_tensors(entry, found) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_tensors(entry, found) for entry in value)
    return value


def _slots(value: Any) -> list[_Slot]:
    found: list[_Slot] = []
    if isinstance(value, _Slot):
        found.append(value)
    elif isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            found += _slots(entry)
    return found


def _with_tensors(value: Any, tensors: Any) -> Any:
    if isinstance(value, _Slot):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _with_tensors(entry, tensors) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(entry, tensors) for entry in value)
    return value


def checksum(value: Any, seed: int = 0) -> int:
    """CRC-32 of a tensor's bytes, or of a structure of tensors and plain values, in a fixed order."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        flat = torch.view_as_real(flat) if flat.is_complex() else flat
        return zlib.crc32(flat.reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(str(value.shape).encode(), seed))
    if isinstance(value, dict):
        for key, entry in value.items():
            seed = checksum(entry, zlib.crc32(repr(key).encode(), seed))
        return seed
    if isinstance(value, list | tuple):
        for entry in value:
            seed = checksum(entry, seed)
        return seed
    text = repr(value)
    return zlib.crc32((type(value).__qualname__ if " at 0x" in text else text).encode(), seed)
