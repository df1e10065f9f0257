"""The PyTorch adapter under Horovod's names: ``import hvdplus.torch as hvd``."""

from hvdplus_torch import *  # noqa: F403
from hvdplus_torch import __all__, __getattr__  # noqa: F401
