"""Finds the adapter by the optimizer's class, and imports only that."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from hvdplus.errors import StrategyError
from hvdplus.strategy import Strategy

_ADAPTERS = {"torch.optim": "hvdplus_torch", "keras": "hvdplus_keras"}


def wrap(
    optimizer: Any,
    *,
    model: Any = None,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    strategy: Strategy | str | None = None,
    **fields: Any,
) -> Any:
    """Make ``optimizer`` exchange with all ranks, and return it.

    The optimizer keeps its class and gains ``.hvdplus`` (strategy, world, ``stats()``, ``updated``). ``init()`` is
    called if nobody did.

    Args:
        optimizer: a ``torch.optim.Optimizer`` or a ``keras.optimizers.Optimizer``.
        model: the model it trains; its parameters, buffers and the optimizer's state are copied from rank 0 now.
        named_parameters: (name, parameter) pairs instead; copied from rank 0 at the first step, if they differ.
        strategy: a ``Strategy``, a codec spec or ``"codec,field=value,..."``; ``None`` is ``HVDPLUS_STRATEGY``.
        **fields: fields of the strategy to override, such as ``accumulate=4``.

    Raises:
        StrategyError: the optimizer is of no known framework or wrapped already, or the strategy is not valid.
    """
    return importlib.import_module(_adapter(optimizer)).wrap(
        optimizer, model=model, named_parameters=named_parameters, strategy=strategy, **fields
    )


def _adapter(optimizer: Any) -> str:
    for kind in type(optimizer).__mro__:
        for prefix, adapter in _ADAPTERS.items():
            if kind.__module__ == prefix or kind.__module__.startswith(prefix + "."):
                return adapter
    raise StrategyError(
        f"optimizer={optimizer!r} is a {type(optimizer).__module__}.{type(optimizer).__qualname__}, not an optimizer "
        f"of a known framework; pass a torch.optim.Optimizer or a keras.optimizers.Optimizer."
    )
