"""Runs the examples in the docstrings of the core."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import hvdplus

FACADES = {"hvdplus.torch", "hvdplus.tensorflow", "hvdplus.keras", "hvdplus.cli.__main__"}
MODULES = sorted({m.name for m in pkgutil.walk_packages(hvdplus.__path__, "hvdplus.")} - FACADES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples_of_what_users_write():
    finder = doctest.DocTestFinder()
    for name in ("hvdplus.strategy", "hvdplus.codecs.registry", "hvdplus.testing"):
        assert any(found.examples for found in finder.find(importlib.import_module(name))), name
