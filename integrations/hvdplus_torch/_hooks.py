"""The hooks by which autograd tells of gradients: one a parameter, one at the end of each backward pass."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd import Variable
from torch.utils.weak import WeakIdKeyDictionary


class Listener(Protocol):
    """Whoever is told, in its ``order`` among others.

    Hooks hold it weakly: an optimizer that is dropped is collected, and its hooks fall silent.
    """

    order: int

    def arriving(self, index: int) -> None:
        """Autograd is about to add to this parameter's gradient."""

    def arrived(self, index: int, p: torch.nn.Parameter) -> None:
        """This parameter's gradient of this backward pass is complete."""

    def ending(self) -> None:
        """The backward pass is over: send what is to be sent."""

    def end(self) -> None:
        """Wait for what was sent."""


# The hooks that serve a parameter: those of the newest optimizer that was wrapped around it.
_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Hooks:
    """One optimizer's hooks. ``early`` adds those that fire before autograd adds to a gradient."""

    def __init__(self, listener: Listener, early: bool) -> None:
        self.early = early
        self._listener = weakref.ref(listener)
        self._handles: list[list[Any]] = []
        self._ending: Callable[[], object] = _nothing

    def extend(self, params: list[torch.nn.Parameter]) -> None:
        """Hook the parameters that have none yet; ``params`` only ever grows."""
        for index in range(len(self._handles), len(params)):
            self._handles.append(self._hook(params[index], index))

    def clear(self) -> None:
        """Unhook all."""
        for handles in self._handles:
            for handle in handles:
                handle.remove()
        self._handles = []

    def _hook(self, p: torch.nn.Parameter, index: int) -> list[Any]:
        if not (p.is_floating_point() or p.is_complex()):  # an integer has no gradient
            return []
        if p in _OWNERS:
            for handle in _OWNERS[p]:
                handle.remove()
        trained = p.requires_grad
        p.requires_grad_(True)  # torch refuses to hook what is frozen, and it may be thawed later
        handles = [p.register_post_accumulate_grad_hook(partial(_arrived, self._listener, index))]
        if self.early:
            handles.append(p.register_hook(partial(_arriving, self._listener, index)))
        p.requires_grad_(trained)
        _OWNERS[p] = handles
        return handles

    @property
    def running(self) -> bool:
        """Whether a backward pass was opened and has neither ended nor failed."""
        return self._ending() is not None

    def open(self) -> None:
        """Have the listener told when the backward pass that runs now is over."""
        global _running
        end = _running()
        if end is None:
            end = _End()
            _running = weakref.ref(end)
            Variable._execution_engine.queue_callback(end)
        end.listeners.append(self._listener)
        self._ending = weakref.ref(end)

    def close(self) -> None:
        """Note that it is over."""
        self._ending = _nothing


def _nothing() -> None:
    return None


class _End:
    """The end of one backward pass; autograd alone keeps it alive, so a backward that failed is noticed.

    Of several optimizers all send before any waits, and they wait in the order in which they were wrapped: the order in
    which autograd reached them may differ between ranks.
    """

    def __init__(self) -> None:
        self.listeners: list[weakref.ref[Listener]] = []

    def __call__(self) -> None:
        global _running
        _running = _nothing
        alive = sorted(filter(None, (listener() for listener in self.listeners)), key=lambda one: one.order)
        for one in alive:
            one.ending()
        for one in alive:
            one.end()


_running: Callable[[], _End | None] = _nothing


def _arrived(listener: weakref.ref[Listener], index: int, p: torch.nn.Parameter) -> None:
    alive = listener()
    if alive is None:
        return
    if torch.is_grad_enabled():  # backward(create_graph=True); entering no_grad each time would cost a microsecond
        with torch.no_grad():
            alive.arrived(index, p)
    else:
        alive.arrived(index, p)


def _arriving(listener: weakref.ref[Listener], index: int, grad: torch.Tensor) -> None:
    alive = listener()
    if alive is not None:
        alive.arriving(index)


def in_reentrant_checkpoint() -> bool:
    """Whether this backward pass is one inside another, as reentrant activation checkpointing makes them."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("checkpoint.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
