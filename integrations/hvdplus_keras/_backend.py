"""What the two backends of Keras do differently: whose session it is, and how an exchange is put into a step."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from hvdplus.arrays import Cell, NumPyArray
from hvdplus.collectives import Collectives
from hvdplus.errors import StrategyError
from hvdplus.plan import Bucket, Plan
from hvdplus.reducer import Reducer
from hvdplus.session import Session
from hvdplus.stats import Stats
from hvdplus.strategy import Strategy

_ADAPTERS = {"tensorflow": "hvdplus_tensorflow", "torch": "hvdplus_torch"}


class Exchange(Protocol):
    """Averages buckets over the ranks; see ``hvdplus_tensorflow._exchange.Exchange``."""

    asks: list[str]  # what codecs of users ask for

    @property
    def reducer(self) -> Reducer[Any]:
        """Has the codecs' state."""

    def __call__(self, values: list[Any], step: Any, scale: Any = None) -> tuple[list[Any], Any]:
        """Return the means, and what the hook after the exchange returned."""

    def joined(self, parts: Sequence[Any], bucket: Bucket) -> Any:
        """Return the flat values of a bucket's members behind one another."""


class Backend(Protocol):
    """One backend of Keras."""

    def session(self) -> Session[Any]:
        """Return the session, started if it was not."""

    def group(self, process_set: Any) -> Collectives[Any]:
        """Return the collectives among a Horovod process set."""

    def exchange(
        self,
        plan: Plan,
        strategy: Strategy,
        collectives: Collectives[Any],
        scope: str,
        stats: Stats,
        before: Callable[[], float],
        after: Callable[[NumPyArray], bool],
        new_variable: Callable[[str, int, str], Any],
    ) -> Exchange:
        """Make the exchange of a plan, which keeps its state in variables of the optimizer."""

    def dense(self, gradient: Any) -> Any:
        """Return a gradient as a plain tensor."""

    def eager(self) -> bool:
        """Whether tensors have values now, rather than when a graph runs."""

    def outside(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which tensors have values even while a graph is being traced."""

    def call(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Have ``function`` called with the values as NumPy arrays whenever the step comes to this place."""

    def compiled(self) -> bool:
        """Whether what is being traced will be compiled, where no exchange can be."""


class _TensorFlow:
    """Keras on TensorFlow."""

    def session(self) -> Session[Any]:
        from hvdplus_tensorflow import _session

        _session.init()
        _session.session().meet()
        return _session.session()

    def group(self, process_set: Any) -> Collectives[Any]:
        from hvdplus_tensorflow._engines import HorovodCollectives

        return HorovodCollectives(process_set)

    def exchange(
        self,
        plan: Plan,
        strategy: Strategy,
        collectives: Collectives[Any],
        scope: str,
        stats: Stats,
        before: Callable[[], float],
        after: Callable[[NumPyArray], bool],
        new_variable: Callable[[str, int, str], Any],
    ) -> Exchange:
        from hvdplus_tensorflow._exchange import Exchange as TracedExchange
        from hvdplus_tensorflow._exchange import VariableCell

        def new_cell(name: str, size: int, dtype: str) -> Cell[Any]:
            return VariableCell(new_variable(name, size, dtype))

        session = self.session()
        return TracedExchange(plan, strategy, session, collectives, scope, stats, before, after, new_cell, weighed=True)

    def dense(self, gradient: Any) -> Any:
        import tensorflow as tf

        return tf.convert_to_tensor(gradient)

    def eager(self) -> bool:
        import tensorflow as tf

        return bool(tf.executing_eagerly())

    def outside(self) -> contextlib.AbstractContextManager[Any]:
        import tensorflow as tf

        scope: contextlib.AbstractContextManager[Any] = tf.init_scope()
        return scope

    def call(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        import tensorflow as tf

        return tf.numpy_function(lambda *arrays: bool(function(*arrays)), list(values), tf.bool)

    def compiled(self) -> bool:
        from hvdplus_tensorflow._exchange import in_xla

        return in_xla()


class _Torch:
    """Keras on PyTorch, where every step is eager."""

    def session(self) -> Session[Any]:
        from hvdplus_torch import _session

        _session.init()
        return _session.session()

    def group(self, process_set: Any) -> Collectives[Any]:
        from hvdplus_torch._engines import HorovodCollectives

        return HorovodCollectives(process_set)

    def exchange(
        self,
        plan: Plan,
        strategy: Strategy,
        collectives: Collectives[Any],
        scope: str,
        stats: Stats,
        before: Callable[[], float],
        after: Callable[[NumPyArray], bool],
        new_variable: Callable[[str, int, str], Any],
    ) -> Exchange:
        from hvdplus_keras._eager import EagerExchange

        return EagerExchange(plan, strategy, self.session(), collectives, scope, stats, before, after, new_variable)

    def dense(self, gradient: Any) -> Any:
        return gradient.to_dense() if gradient.is_sparse else gradient.detach()

    def eager(self) -> bool:
        return True

    def outside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def call(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        return function(*(keras.ops.convert_to_numpy(value) for value in values))

    def compiled(self) -> bool:
        import torch

        return bool(torch.compiler.is_compiling())


def backend() -> Backend:
    """Return the backend that Keras runs on.

    Raises:
        StrategyError: it is neither TensorFlow nor PyTorch.
    """
    adapter()
    return _TensorFlow() if keras.backend.backend() == "tensorflow" else _Torch()


def adapter() -> Any:
    """Return the adapter of the backend's own framework: its ``init``, ``rank`` and collectives serve Keras too.

    Raises:
        StrategyError: there is none.
    """
    name = keras.backend.backend()
    if name not in _ADAPTERS:
        raise StrategyError(
            f"Keras runs on backend {name!r}, which hvdplus does not serve; set KERAS_BACKEND=tensorflow or torch "
            f"before Keras is imported."
        )
    return importlib.import_module(_ADAPTERS[name])
