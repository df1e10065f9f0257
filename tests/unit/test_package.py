"""Tests of what the package shows: its names, its errors, what importing it costs, and how it finds an adapter."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hvdplus
from hvdplus.stats import Stats


def test_exports():
    assert hvdplus.__all__ == sorted(hvdplus.__all__)
    assert {"wrap", "Strategy", "discover", "World", "codecs"} <= set(hvdplus.__all__)
    assert all(hasattr(hvdplus, name) for name in hvdplus.__all__)
    assert all(hasattr(hvdplus.codecs, name) for name in hvdplus.codecs.__all__)
    public = {name for name in vars(hvdplus) if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(hvdplus, name), type(sys))}
    assert public - modules <= set(hvdplus.__all__)


def test_errors_are_one_tree():
    for error in (hvdplus.StrategyError, hvdplus.LaunchError, hvdplus.ExchangeError):
        assert issubclass(error, hvdplus.HvdplusError)
    assert issubclass(hvdplus.StrategyError, ValueError)
    assert issubclass(hvdplus.ExchangeError, RuntimeError)
    assert not issubclass(hvdplus.HvdplusError, ValueError | RuntimeError)


@pytest.mark.parametrize("module", ["hvdplus", "hvdplus.testing", "hvdplus.reducer", "hvdplus.session"])
def test_importing_the_core_imports_no_framework_no_horovod_and_no_mpi(module):
    code = (
        f"import sys, {module}; "
        "print(sorted({'torch', 'tensorflow', 'keras', 'jax', 'horovod', 'mpi4py'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_wrap_refuses_what_is_no_optimizer_in_one_sentence():
    with pytest.raises(hvdplus.StrategyError) as caught:
        hvdplus.wrap(3)
    message = str(caught.value)
    assert message.startswith("optimizer=3 is a builtins.int, not an optimizer of a known framework; pass a ")
    assert message.endswith(".")


def test_wrap_goes_by_the_class_not_by_a_name_that_looks_alike():
    kind = type("SGD", (), {"__module__": "torch.optimizers_of_mine"})
    with pytest.raises(hvdplus.StrategyError, match=r"is a torch\.optimizers_of_mine\.SGD, not an optimizer of a"):
        hvdplus.wrap(kind())


def test_wrap_finds_the_adapter_through_base_classes_and_hands_everything_on(monkeypatch):
    calls = []
    adapter = type(sys)("hvdplus_torch")
    adapter.wrap = lambda optimizer, **options: calls.append((optimizer, options)) or "wrapped"
    monkeypatch.setitem(sys.modules, "hvdplus_torch", adapter)
    base = type("SGD", (), {"__module__": "torch.optim.sgd"})
    optimizer = type("Mine", (base,), {"__module__": "mine"})()
    assert hvdplus.wrap(optimizer, model="m", strategy="fp16", accumulate=2) == "wrapped"
    options = {"model": "m", "named_parameters": None, "strategy": "fp16", "accumulate": 2}
    assert calls == [(optimizer, options)]


def test_stats_are_a_dict_of_their_fields():
    assert Stats(steps=2, bytes_sent=5).to_dict() == {
        "steps": 2,
        "collectives": 0,
        "bytes_dense": 0,
        "bytes_sent": 5,
        "seconds_encode": 0.0,
        "seconds_wait": 0.0,
        "relative_error": None,
    }
