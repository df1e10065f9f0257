"""Building Horovod 0.28.1, untouched, for the frameworks, MPI and compiler that are installed today."""

from hvdplus.errors import HvdplusError

__all__ = ["HOROVOD_VERSION", "BuildError"]

HOROVOD_VERSION = "0.28.1"


class BuildError(HvdplusError):
    """Horovod cannot be built, installed or checked here; the message says why and what to do."""
