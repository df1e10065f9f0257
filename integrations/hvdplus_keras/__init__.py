"""hvdplus for Keras 3."""
from hvdplus_keras._optimizer import DistributedOptimizer, wrap
__all__ = ["DistributedOptimizer", "wrap"]
