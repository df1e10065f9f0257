"""The multi-rank tests' option: --ranks N runs them with N ranks only."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--ranks", type=int, default=None, help="run the multi-rank tests with this many ranks only")


def pytest_collection_modifyitems(config, items):
    wanted = config.getoption("--ranks")
    if wanted is None:
        return
    for item in items:
        spec = getattr(item, "callspec", None)
        ranks = spec.params.get("ranks") if spec else None
        if ranks is not None and ranks != wanted:
            item.add_marker(pytest.mark.skip(reason=f"--ranks {wanted}"))
