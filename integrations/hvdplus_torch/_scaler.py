"""Refuses a ``GradScaler`` step in a half-filled window, with the loop to write."""

from __future__ import annotations

import torch

from hvdplus.errors import StrategyError
from hvdplus.reducer import Window


class ScalerGuard:
    """A loss scale must not change inside a window: its micro-batches would be added in different units.

    GradScaler unscales and skips by itself, and would fail on missing gradients with words of its own. An optimizer
    that says it scales by itself is handed the step instead; that is said while a window is half full.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before: bool | None = None

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
