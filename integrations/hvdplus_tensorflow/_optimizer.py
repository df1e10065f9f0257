"""``DistributedOptimizer`` where TensorFlow programs look for it: Keras' optimizers are ours, older ones Horovod's."""

from __future__ import annotations

from typing import Any

import keras

from hvdplus_tensorflow._engines import horovod


def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802 - Horovod's name
    """Wrap an optimizer: a Keras one as ``hvdplus.keras`` does, a ``tf.compat.v1`` one as Horovod does."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return horovod().DistributedOptimizer(optimizer, *args, **kwargs)
    from hvdplus_keras import DistributedOptimizer as Ours

    return Ours(optimizer, *args, **kwargs)
