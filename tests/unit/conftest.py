"""Settings of this folder's tests."""

from hypothesis import settings

# Machines that are shared have no steady clock.
settings.register_profile("hvdplus", deadline=None, max_examples=60)
settings.load_profile("hvdplus")
