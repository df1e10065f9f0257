"""Callbacks under Horovod's names. What they do at the end of an epoch, they do when all ranks are there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import keras

from hvdplus.errors import StrategyError
from hvdplus_keras._backend import backend
from hvdplus_keras._exchanger import copy_from
from hvdplus_keras._optimizer import find, shared


def _gather(value: Any) -> list[Any]:
    """Return every rank's value, of a kind that JSON can hold."""
    return [json.loads(text) for text in backend().session().gather(json.dumps(value).encode())]


def _meet(model: Any) -> None:
    """Wait for the ranks that still have batches of this epoch, and follow their updates meanwhile."""
    exchanger = find(model.optimizer)
    if exchanger is not None:
        exchanger.join(model.trainable_variables)


def _averaged(logs: dict[str, Any]) -> dict[str, float]:
    """Return the mean of each number over the ranks that have it."""
    everyone = _gather({key: float(value) for key, value in logs.items()})
    keys = sorted({key for one in everyone for key in one})
    values = {key: [one[key] for one in everyone if key in one] for key in keys}
    return {key: sum(found) / len(found) for key, found in values.items()}


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Give every rank ``root_rank``'s weights and optimizer state, before the first batch.

    A wrapped optimizer sees to that by itself for rank 0; this is for other ranks, and for models without one.

    Args:
        root_rank: the rank whose values all get.
        device: Horovod's; not needed.
        local_variables: variables to leave alone.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        local = [] if local_variables is None else local_variables
        self._local = {id(v) for v in (local if isinstance(local, list | tuple | set) else [local])}
        self._done = False

    def register_local_var(self, var: Any) -> None:
        """Leave this variable alone."""
        self._local.add(id(var))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast once, before the first batch."""
        if self._done:
            return
        self._done = True
        optimizer = self.model.optimizer
        variables = [*self.model.variables, *(optimizer.variables if optimizer is not None else [])]
        mine = [v for v in shared(optimizer, variables) if id(v) not in self._local]
        copy_from(backend().session(), mine, self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Average metrics over the ranks at the end of an epoch; put it before callbacks that read them."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average ``logs`` in place."""
        _meet(self.model)
        if logs is not None:
            logs.update(_averaged(logs))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Set the learning rate to ``initial_lr * multiplier`` between two epochs.

    Args:
        initial_lr: the rate that is multiplied.
        multiplier: a number m (the rate falls as ``m ** (epoch - start_epoch)``) or a function of the epoch.
        start_epoch: the first epoch in which it acts.
        end_epoch: the first in which it no longer does; ``None`` for never.
        staircase: once an epoch; else before every batch, with a fraction for the epoch.
        momentum_correction: Horovod's; Keras 3 traces momentum as a constant, so it stays what it is.
        steps_per_epoch: batches to an epoch, where Keras does not know.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[Any], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise StrategyError("initial_lr=None: give the learning rate that is multiplied.")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.steps_per_epoch = staircase, steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[Any], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many batches an epoch has."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            raise StrategyError(f"{type(self).__name__} cannot see how long an epoch is; give it steps_per_epoch.")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate if it is due."""
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if self.staircase and batch == 0:
            self._set(self.current_epoch)
        elif not self.staircase and self.steps_per_epoch:
            self._set(self.current_epoch + batch / self.steps_per_epoch)

    def _set(self, epoch: float) -> None:
        self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the rate."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate batch by batch from ``initial_lr / ranks`` to ``initial_lr`` (Goyal et al. 2017)."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            ranks = backend().session().world.size
            reached = epoch + 1.0 / (self.steps_per_epoch or 1)  # a round number at an epoch's end
            return (reached * (ranks - 1) / warmup_epochs + 1) / ranks

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the rate, and say when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.end_epoch and backend().session().world.rank == 0:
            keras.utils.io_utils.print_msg(f"\nEpoch {epoch + 1}: learning rate warm-up ends at {self._rate():g}.")


class EarlyStopping(keras.callbacks.EarlyStopping):  # type: ignore[misc]
    """Keras' ``EarlyStopping`` on the mean of what it monitors over the ranks, so that all of them stop together."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Decide by the mean."""
        _meet(self.model)
        super().on_epoch_end(epoch, _averaged(logs or {}))
        self.model.stop_training = any(_gather(bool(self.model.stop_training)))


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Save the best model so far, by the mean over ranks of what is monitored; rank 0 writes.

    Args:
        filepath: where to; Horovod's estimators set it later, so it may be missing until training begins.
        monitor: what to look at; the rest as for ``keras.callbacks.ModelCheckpoint``.
        verbose: 1 to say when it saves.
        save_weights_only: leave out the optimizer and the model's structure.
        mode: ``"min"``, ``"max"`` or ``"auto"``.
        save_freq: ``"epoch"``; a mean over ranks is taken at the end of epochs only.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str = "epoch",
        filepath: str | None = None,
    ) -> None:
        if save_freq != "epoch":
            raise StrategyError(
                f"save_freq={save_freq!r} must be 'epoch': ranks take a mean at the end of epochs only."
            )
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(filepath or f"best{ending}", monitor, verbose, True, save_weights_only, mode, save_freq)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save on rank 0 if the mean is better than before; the others wait."""
        _meet(self.model)
        mean = _averaged(logs or {})
        if backend().session().world.rank == 0:
            super().on_epoch_end(epoch, mean)
        _gather(0)
