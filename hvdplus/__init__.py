"""The layer that makes Horovod work, and pay, on today's PyTorch: one strategy, one line to wrap an optimizer."""

from hvdplus import codecs
from hvdplus.errors import ExchangeError, HvdplusError, LaunchError, StrategyError
from hvdplus.strategy import Strategy
from hvdplus.version import __version__
from hvdplus.world import World, clean_env, discover
from hvdplus.wrap import wrap

__all__ = [
    "ExchangeError",
    "HvdplusError",
    "LaunchError",
    "Strategy",
    "StrategyError",
    "World",
    "__version__",
    "clean_env",
    "codecs",
    "discover",
    "wrap",
]
