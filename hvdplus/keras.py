"""The Keras 3 adapter under Horovod's names: ``import hvdplus.keras as hvd``."""

from hvdplus_keras import *  # noqa: F403
from hvdplus_keras import __all__, __getattr__  # noqa: F401
