"""Finds the lines of a program that import Horovod's own Keras wrapper, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

WRAPPERS = ("horovod.keras", "horovod.tensorflow.keras")


def imports_of_wrapper(text: str) -> list[tuple[int, str]]:
    """Return line numbers and names of every import of Horovod's Keras wrapper, in order.

    >>> imports_of_wrapper("import os" + chr(10) + "from horovod.tensorflow import keras as hvd")
    [(2, 'horovod.tensorflow.keras')]

    Raises:
        SyntaxError: the text is no Python.
    """
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt | ast.expr)]
    return sorted({(node.lineno, name) for node in nodes for name in _wrapper_names(node)})


def _wrapper_names(node: ast.AST) -> Iterator[str]:
    for name in [*_imported(node), *_called(node)]:
        wrapper = next((each for each in WRAPPERS if name == each or name.startswith(f"{each}.")), None)
        if wrapper:
            yield wrapper


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _called(node: ast.AST) -> list[str]:
    """Return the constant argument of ``importlib.import_module`` or ``__import__``."""
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
        return []
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return [str(node.args[0].value)] if name in ("import_module", "__import__") else []
