"""Settings of this folder's tests."""

from hypothesis import settings

# Machines that are shared have no steady clock.
settings.register_profile("hvdplus", deadline=None)
settings.load_profile("hvdplus")
