"""The state that Horovod Elastic keeps of a Keras 3 model; the rest of ``elastic`` is Horovod's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from horovod.common.elastic import ObjectState
from horovod.tensorflow.keras.elastic import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

from hvdplus.errors import StrategyError
from hvdplus_keras._backend import adapter, backend
from hvdplus_keras._exchanger import copy_from
from hvdplus_keras._optimizer import shared

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class KerasState(ObjectState):  # type: ignore[misc]
    """A model, its optimizer and values of your own, which can be saved, restored, and copied from rank 0.

    Args:
        model: the model, built.
        optimizer: its optimizer, if it is not compiled with it.
        **kwargs: values to keep; they become attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise StrategyError("the model is not built; run model.build(input_shape) first.")
        self.model, self.optimizer = model, optimizer or model.optimizer
        self._save_model()
        ask: Callable[[], int] = adapter().rank
        super().__init__(bcast_object=adapter().broadcast_object, get_rank=ask, **kwargs)

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.variables]

    def _save_model(self) -> None:
        self._saved = [(v, keras.ops.convert_to_numpy(v).copy()) for v in self._variables()]

    def save(self) -> None:
        """Keep what there is now."""
        self._save_model()
        super().save()

    def restore(self) -> None:
        """Go back to what was kept."""
        for variable, value in self._saved:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Take rank 0's, and keep it; what a rank alone has, such as what its codecs did not deliver, stays its own."""
        copy_from(backend().session(), shared(self.optimizer, self._variables()))
        self._save_model()
        super().sync()
