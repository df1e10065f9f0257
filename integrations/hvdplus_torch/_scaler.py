"""Knows by which factor a ``GradScaler`` has scaled a backward pass, and refuses its step in a half-filled window."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

from hvdplus.errors import StrategyError
from hvdplus.reducer import Window


class ScalerGuard:
    """One optimizer's view of the loss scaling, if there is any.

    A loss scale must not change inside a window: its micro-batches would be added in different units. GradScaler
    unscales and skips by itself, and would fail on missing gradients with words of its own. An optimizer that says it
    scales by itself is handed the step instead; that is said while a window is half full.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before: bool | None = None
        self._scaler: Callable[[], Any] = _nothing

    def listen(self) -> None:
        """Note whether a scaler has scaled the loss of the backward pass that runs now, and which."""
        scaled = _running()
        self._scaler = _nothing if scaled is None else weakref.ref(scaled.scaler)

    def scale(self) -> float:
        """Return the factor on the gradients of the last backward pass; waits for the device that has it."""
        scaler = self._scaler()
        return 1.0 if scaler is None else float(scaler.get_scale())

    def block(self) -> None:
        """Have the scaler hand over its step."""
        if self._before is None:
            self._before = getattr(self._optimizer, "_step_supports_amp_scaling", False)
        self._optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def unblock(self) -> None:
        """Let the scaler do as always."""
        if self._before is not None:
            self._optimizer._step_supports_amp_scaling = self._before  # type: ignore[attr-defined]
            self._before = None

    def refuse(self, window: Window) -> None:
        """Refuse if it is the scaler that steps now.

        Raises:
            StrategyError: it is, and the window is not full.
        """
        marks = [name for name in ("found_inf", "grad_scale") if name in self._optimizer.__dict__]
        if window.full or not marks:
            return
        for name in marks:
            delattr(self._optimizer, name)
        raise StrategyError(
            f"GradScaler stepped after micro-batch {window.count} of accumulate={window.length}, and a loss scale must "
            f"not change inside a window; call scaler.step(optimizer), scaler.update() and optimizer.zero_grad() only "
            f"`if optimizer.hvdplus.ready:`, that is after the window's last backward (a trailing partial window: "
            f"optimizer.hvdplus.flush() first)."
        )


# -- which backward pass is scaled ----------------------------------------------------------------------------


def _nothing() -> None:
    return None


class _Scaled:
    """A backward pass from a scaled loss; autograd alone keeps it alive, so one that failed is not taken for the next.

    The scale matters while gradients are exchanged, which is before the scaler is told of any optimizer.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler, self._before = scaler, _running

    def __call__(self) -> None:
        global _running
        _running = self._before


_running: Callable[[], _Scaled | None] = _nothing


def _begin(scaler: Any, grad: torch.Tensor) -> None:
    """Note that the backward pass which has just begun is one from a loss of ``scaler``'s."""
    global _running
    scaled = _Scaled(scaler)
    _running = weakref.ref(scaled)
    Variable._execution_engine.queue_callback(scaled)


def _marked(scaler: Any, outputs: Any) -> Any:
    """Have scaled losses, of the structure that ``scale`` takes, tell when a backward pass begins with them."""
    if isinstance(outputs, torch.Tensor):
        if outputs.requires_grad:
            outputs.register_hook(functools.partial(_begin, scaler))
        return outputs
    each = map(functools.partial(_marked, scaler), outputs)
    return type(outputs)(each) if isinstance(outputs, list | tuple) else each


_GradScaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
_scale = _GradScaler.scale


@functools.wraps(_scale)
def _scale_and_mark(self: Any, outputs: Any) -> Any:
    scaled = _scale(self, outputs)
    return _marked(self, scaled) if self.is_enabled() else scaled


# What codecs keep has to follow the scale, and nothing else in a backward pass tells of it.
_GradScaler.scale = _scale_and_mark
