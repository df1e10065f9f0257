"""The cases that several test modules share are rewritten too, so that a failed assertion shows its values."""

import pytest

pytest.register_assert_rewrite("arrays_cases", "codec_laws")
