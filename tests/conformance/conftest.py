"""Settings of this folder's tests."""

import pytest
from hypothesis import settings

# The cases that several modules share are rewritten too, so that a failed assertion shows its values.
pytest.register_assert_rewrite("arrays_cases", "codec_laws")

# Machines that are shared have no steady clock.
settings.register_profile("hvdplus", deadline=None, max_examples=60)
settings.load_profile("hvdplus")
