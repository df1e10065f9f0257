"""The TensorFlow adapter under Horovod's names: ``import hvdplus.tensorflow as hvd``."""

from hvdplus_tensorflow import *  # noqa: F403
from hvdplus_tensorflow import __all__, __getattr__  # noqa: F401
