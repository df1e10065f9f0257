"""The exceptions that hvdplus raises, all below one root so that a caller can catch them together."""

from __future__ import annotations


class HvdplusError(Exception):
    """Root of everything hvdplus raises on purpose."""


class StrategyError(HvdplusError, ValueError):
    """A strategy, codec spec or optimizer argument that cannot be used as given."""


class LaunchError(HvdplusError):
    """The launcher's environment, the engine and the world they describe do not fit together."""


class ExchangeError(HvdplusError, RuntimeError):
    """An exchange between ranks cannot be completed, or its ranks disagree about what to exchange."""
