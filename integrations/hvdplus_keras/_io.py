"""Loads models whose optimizer exchanges, whatever wrapped it when it was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdplus_keras._optimizer import DistributedOptimizer, find


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a model, and wrap its optimizer if it was saved unwrapped.

    A wrapped optimizer comes back wrapped from ``keras.models.load_model`` too; this is for models that Horovod or
    plain Keras saved.

    Args:
        filepath: a ``.keras`` or ``.h5`` file.
        custom_optimizers: optimizer classes of your own.
        custom_objects: other objects of your own, by name.
        compression: Horovod's, for an optimizer that was saved unwrapped.
        legacy_opts: Horovod's; Keras 3 has no legacy optimizers.
        **options: as for ``DistributedOptimizer``.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if model.optimizer is not None and find(model.optimizer) is None:
        DistributedOptimizer(model.optimizer, compression=compression, model=model, **options)
    return model
