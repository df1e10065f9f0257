"""Wraps a torch optimizer in place: ``wrap`` for hvdplus' own words, ``DistributedOptimizer`` for Horovod's."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from hvdplus import autotune
from hvdplus.collectives import Collectives, LocalCollectives
from hvdplus.errors import StrategyError
from hvdplus.horovod_arguments import Average, strategy_of
from hvdplus.strategy import Strategy
from hvdplus.world import World
from hvdplus_torch import _session
from hvdplus_torch._broadcast import optimizer_state_from
from hvdplus_torch._engines import HorovodCollectives
from hvdplus_torch._exchanger import Exchanger
from hvdplus_torch._state import KEY, check

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
Named = Iterable[tuple[str, torch.Tensor]]

_SCOPES = itertools.count()


class Attachment:
    """What a wrapped optimizer has as ``.hvdplus``."""

    def __init__(self, exchanger: Exchanger) -> None:
        self._exchanger = exchanger

    def __repr__(self) -> str:
        return f"<hvdplus: {self.strategy} as rank {self.world.rank} of {self.world.size}>"

    @property
    def strategy(self) -> Strategy:
        """The strategy in force."""
        return self._exchanger.strategy

    @property
    def world(self) -> World:
        """This rank's place in the job."""
        return self._exchanger.session.world

    @property
    def updated(self) -> bool:
        """Whether the last ``step()`` really updated the parameters."""
        return self._exchanger.updated

    @property
    def ready(self) -> bool:
        """Whether the window is full: gradients are averaged and the next ``step()`` will update."""
        return self._exchanger.ready

    def stats(self) -> dict[str, float | int | None]:
        """Return totals since wrapping: collectives, bytes, seconds, relative error.

        ``steps`` are the exchanges, those before a checkpoint that was loaded among them.
        """
        return self._exchanger.stats.to_dict()

    def parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """Return every parameter's name, the same on all ranks."""
        return self._exchanger.named()

    def flush(self) -> bool:
        """Close a partial window, as at the end of the data: average what is there, so that ``step()`` updates.

        All ranks call it together. Returns False where there was nothing on any rank.
        """
        return self._exchanger.flush()

    def set_accumulation(self, micro_batches: int) -> None:
        """Change ``accumulate`` from the next window on; all ranks to the same number.

        Raises:
            StrategyError: a window is half full, or the number is not allowed.
        """
        self._exchanger.resize(micro_batches)

    def verify(self) -> None:
        """Compare all parameters across ranks now; all ranks call it together.

        Raises:
            ExchangeError: they differ.
        """
        exchanger = self._exchanger
        exchanger.consensus.verify(exchanger.stats.steps, exchanger.updates)

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return a copy of what this rank has not delivered yet, by parameter name, in the unit of true gradients."""
        return self._exchanger.memory.residuals()

    def residual_norm(self) -> float:
        """Return the Euclidean norm of all this rank's residuals; 0 where codecs keep nothing."""
        return self._exchanger.memory.norm()

    def clear_residuals(self) -> None:
        """Forget what this rank has not delivered, as after weights were set by hand."""
        self._exchanger.memory.clear()

    def consolidate(self) -> None:
        """Fetch all ranks' residuals, so that ``state_dict()`` holds them on every rank until the next update.

        All ranks call it together, and one of them may then save for all. Each needs room in host memory for as many
        copies of the model as there are ranks.
        """
        self._exchanger.memory.consolidate()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in this context add to ``p.grad`` on this rank; the next one outside exchanges it."""
        with self._exchanger.paused():
            yield


def wrap(
    optimizer: O,
    *,
    model: torch.nn.Module | None = None,
    named_parameters: Named | None = None,
    strategy: Strategy | str | None = None,
    **fields: Any,
) -> O:
    """Make a torch optimizer exchange with all ranks; see ``hvdplus.wrap``."""
    return _wrap(optimizer, model, named_parameters, Strategy.of(strategy, **fields))


def DistributedOptimizer(  # noqa: N802 - Horovod's name and arguments
    optimizer: O,
    named_parameters: Named | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    *,
    model: torch.nn.Module | None = None,
    strategy: Strategy | str | None = None,
    **fields: Any,
) -> O:
    """Horovod's ``DistributedOptimizer``, which returns the optimizer it was given.

    Horovod's meaning holds: ``backward_passes_per_step=k`` adds up k passes and averages over ranks; the strategy's
    ``accumulate=k`` is the mean over both. ``gradient_predivide_factor``, ``num_groups``, ``groups`` and
    ``sparse_as_dense`` are accepted: sums cannot overflow where their mean does not, buckets group by themselves, and
    sparse gradients travel dense.

    Raises:
        StrategyError: arguments contradict each other or cannot be used; the message names them.
    """
    chosen = strategy_of(
        Strategy.of(strategy, **fields),
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        backward_passes_per_step=backward_passes_per_step,
        num_groups=num_groups,
        groups=groups,
    )
    wrapped = _wrap(optimizer, model, named_parameters, chosen, process_set, sum_passes=backward_passes_per_step > 1)
    wrapped.set_backward_passes_per_step = wrapped.hvdplus.set_accumulation  # type: ignore[attr-defined]
    wrapped._parameter_names = wrapped.hvdplus.parameter_names()  # type: ignore[attr-defined]  # as scripts read it
    return wrapped


def _wrap(
    optimizer: O,
    model: torch.nn.Module | None,
    named_parameters: Named | None,
    strategy: Strategy,
    process_set: Any = None,
    sum_passes: bool = False,
) -> O:
    _check_optimizer(optimizer, strategy)
    if model is not None and not isinstance(model, torch.nn.Module):
        raise StrategyError(f"model={model!r} is a {type(model).__name__}, not a torch.nn.Module; pass the model.")
    _session.init()
    session = _session.session()
    names = _names(optimizer, model, named_parameters)
    collectives = _group(session, process_set)
    if collectives.size == 1:  # one rank is the plain optimizer: nothing is encoded
        strategy = Strategy.of(strategy, codec="exact", overrides={})
    order = next(_SCOPES)
    session.watch.at(0, f"the wrapping of optimizer {order}")
    strategy = autotune.chosen(strategy, session, collectives, _trained_numbers(optimizer))
    wire = session.watch.wait(collectives.own())
    exchanger = Exchanger(optimizer, names, strategy, session, collectives, wire, order, sum_passes)
    _replace_methods(optimizer, exchanger)
    optimizer.hvdplus = Attachment(exchanger)  # type: ignore[attr-defined]
    if model is not None and collectives.size > 1:
        exchanger.agree_now()
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            if isinstance(tensor, torch.Tensor):
                _session.broadcast(session, tensor, 0, f"{exchanger.scope}.{name}", collectives)
        optimizer_state_from(session, optimizer, 0, collectives)
    return optimizer


def _trained_numbers(optimizer: torch.optim.Optimizer) -> int:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return sum(p.numel() for p in params if p.requires_grad and not torch.nn.parameter.is_lazy(p))


def _check_optimizer(optimizer: Any, strategy: Strategy) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise StrategyError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__}, not a torch.optim.Optimizer; pass the optimizer "
            f"itself."
        )
    if hasattr(optimizer, "hvdplus"):
        raise StrategyError(f"this {type(optimizer).__name__} is wrapped already; wrap an optimizer once.")
    if _reevaluates(optimizer) and strategy.accumulate > 1:
        raise StrategyError(
            f"{type(optimizer).__name__} evaluates its closure several times a step, so accumulate="
            f"{strategy.accumulate} has no meaning; use accumulate=1 and loop over micro-batches inside the closure."
        )


def _reevaluates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` cannot do without a closure (LBFGS, sharpness-aware minimisers)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _group(session: _session.Session, process_set: Any) -> Collectives[torch.Tensor]:
    if process_set is None or getattr(process_set, "process_set_id", None) == 0:
        return session.collectives
    if session.engine != "horovod":
        raise StrategyError(f"process_set= needs engine 'horovod', and this job runs on {session.engine!r}.")
    return HorovodCollectives(process_set) if process_set.included() else LocalCollectives()


def _names(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, named_parameters: Named | None
) -> dict[int, str]:
    """Name the parameters, by identity; an optimizer's parameter must have one name, others are of no concern.

    Raises:
        StrategyError: names are given twice, are no pairs, or miss a parameter of the optimizer.
    """
    if named_parameters is None:
        return {} if model is None else {id(p): name for name, p in model.named_parameters()}
    if not isinstance(named_parameters, Iterable):
        raise StrategyError(f"named_parameters={named_parameters!r} must be pairs; pass model.named_parameters().")
    pairs = list(named_parameters)
    if any(not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)) for pair in pairs):
        raise StrategyError("named_parameters must be (name, parameter) pairs; pass model.named_parameters().")
    counts: dict[str, int] = {}
    for name, _ in pairs:
        counts[name] = counts.get(name, 0) + 1
    if twice := [name for name, count in counts.items() if count > 1]:
        raise StrategyError(f"named_parameters has {', '.join(map(repr, twice))} more than once; name each once.")
    names = {id(p): name for name, p in pairs}
    missing = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if missing:
        raise StrategyError(
            f"named_parameters lacks {len(missing)} parameter(s) of the optimizer, of shapes {missing[:5]}; pass "
            f"model.named_parameters() of the whole model."
        )
    return names


# -- the methods of the instance ------------------------------------------------------------------------------


def _replace_methods(optimizer: torch.optim.Optimizer, exchanger: Exchanger) -> None:
    """Put methods on the instance; its class stays what it was.

    They are methods *of the optimizer*, because a learning-rate scheduler takes ``step.__func__`` and binds it anew.
    """
    base_step, base_zero = optimizer.step, optimizer.zero_grad
    base_add, base_load, base_state = optimizer.add_param_group, optimizer.load_state_dict, optimizer.state_dict
    reevaluates = _reevaluates(optimizer)

    @functools.wraps(base_step)
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        if reevaluates:
            result = base_step(_agreeing(closure, exchanger), *args, **kwargs)
            exchanger.finish_update()
            return result
        if closure is None:
            return exchanger.step(functools.partial(base_step, *args, **kwargs) if args or kwargs else base_step)
        with torch.enable_grad():
            loss = closure()
        exchanger.step(functools.partial(base_step, None, *args, **kwargs))
        return loss

    @functools.wraps(base_zero)
    def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        exchanger.zero_grad()
        base_zero(*args, **kwargs)

    @functools.wraps(base_add)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        base_add(param_group)
        exchanger.adopt()

    @functools.wraps(base_state)
    def state_dict(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**base_state(*args, **kwargs), KEY: exchanger.state_dict()}

    @functools.wraps(base_load)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        check(state_dict.get(KEY))
        base_load(state_dict, *args, **kwargs)
        exchanger.load_state_dict(state_dict.get(KEY))

    for method in (step, zero_grad, add_param_group, state_dict, load_state_dict):
        setattr(optimizer, method.__name__, types.MethodType(method, optimizer))
    # Horovod's ritual around clipping; gradients are averaged when backward returns, so it rarely has work to do.
    optimizer.synchronize = exchanger.synchronize  # type: ignore[attr-defined]
    optimizer.skip_synchronize = contextlib.nullcontext  # type: ignore[attr-defined]


def _agreeing(closure: Callable[[], Any] | None, exchanger: Exchanger) -> Callable[[], Any] | None:
    """Return the mean of all ranks' losses, so that an optimizer that decides by the loss decides alike everywhere."""
    if closure is None:
        return None

    def agreeing() -> Any:
        with torch.enable_grad():
            loss = closure()
        return exchanger.consensus.mean(loss)

    return agreeing
