"""Translates the arguments of Horovod's ``DistributedOptimizer`` into a strategy; Horovod's meaning holds."""

from __future__ import annotations

from typing import Any

from hvdplus.errors import StrategyError
from hvdplus.strategy import Strategy

# Horovod's numbers for its reductions.
Average, Sum, Adasum, Min, Max, Product = range(6)


def strategy_of(
    strategy: Strategy,
    *,
    compression: Any,
    op: Any,
    gradient_predivide_factor: float,
    backward_passes_per_step: int,
    num_groups: int,
    groups: Any,
) -> Strategy:
    """Put Horovod's arguments on top of ``strategy``.

    ``gradient_predivide_factor``, ``num_groups`` and ``groups`` change nothing: sums cannot overflow where their mean
    does not, and buckets group by themselves.

    Raises:
        StrategyError: arguments contradict each other or cannot be used; the message names them.
    """
    if compression is not None and (codec := codec_of(compression)) != "exact":
        strategy = _combine(strategy, "codec", codec, "compression")
    _check_op(op, gradient_predivide_factor)
    if op == Sum:
        strategy = _combine(strategy, "op", "sum", "op")
    wanted = num_groups if groups is None else groups
    if isinstance(wanted, int) and wanted < 0:
        raise StrategyError(f"num_groups={wanted!r} must be 0 or more; buckets are sized by bucket_bytes.")
    return _with_passes(strategy, backward_passes_per_step)


def codec_of(compression: Any) -> str:
    """Translate ``compression=`` into a codec spec.

    Raises:
        StrategyError: it is a class of the user's own.
    """
    names = {"NoneCompressor": "exact", "FP16Compressor": "fp16"}
    name = getattr(compression, "__name__", type(compression).__name__).lstrip("_")
    if name not in names:
        raise StrategyError(
            f"compression={name} is not known here; use Compression.none or Compression.fp16, or register a codec "
            f"(hvdplus.codecs.register) and name it in strategy=."
        )
    return names[name]


def _combine(strategy: Strategy, field: str, value: Any, argument: str) -> Strategy:
    given = getattr(strategy, field)
    if given not in (getattr(Strategy(), field), value):
        raise StrategyError(
            f"{argument}= asks for {field}={value!r} and strategy for {field}={given!r}; give one of the two."
        )
    return Strategy.of(strategy, **{field: value})


def _check_op(op: Any, predivide: float) -> None:
    if op == Adasum:
        raise StrategyError(
            "op=Adasum combines updates, not gradients, and is not offered by this optimizer; use Average or Sum, or "
            "Horovod's own DistributedOptimizer."
        )
    if op not in (Average, Sum):
        raise StrategyError(f"op={op!r} must be Average or Sum.")
    if predivide != 1.0 and op != Average:
        raise StrategyError(f"gradient_predivide_factor={predivide!r} needs op=Average; leave it out for op=Sum.")


def _with_passes(strategy: Strategy, passes: int) -> Strategy:
    if not isinstance(passes, int) or passes < 1:
        raise StrategyError(f"backward_passes_per_step={passes!r} must be a whole number above 0.")
    if passes > 1 and strategy.accumulate > 1:
        raise StrategyError(
            f"backward_passes_per_step={passes} and accumulate={strategy.accumulate} contradict each other: the first "
            f"adds up passes, the second averages them; give one of the two."
        )
    return Strategy.of(strategy, accumulate=passes) if passes > 1 else strategy
