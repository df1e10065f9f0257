"""Wraps a Keras optimizer in place: ``wrap`` for hvdplus' own words, ``DistributedOptimizer`` for Horovod's."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import keras
import numpy as np

from hvdplus import autotune
from hvdplus.arrays import NumPyArray
from hvdplus.collectives import Collectives, LocalCollectives
from hvdplus.errors import StrategyError
from hvdplus.horovod_arguments import Average, strategy_of
from hvdplus.session import Session
from hvdplus.strategy import Strategy
from hvdplus.world import World
from hvdplus_keras._backend import backend
from hvdplus_keras._exchanger import Exchanger

# The names under which wrapped optimizers are saved. Where hvdplus.keras is not imported, Keras cannot find them, and
# its error shows the first (.keras) or the second (.h5): the only words that can reach whoever loads the file there.
_PACKAGE = "import hvdplus.keras first"
_MISSING = "hvdplus DistributedOptimizer (import hvdplus.keras first, before the model is loaded)"
_NAME = "DistributedOptimizer"

_MODEL = 10_000_000  # parameters of a model that is not known yet, for the choice of a codec

_SCOPES = itertools.count()
_CLASSES: dict[type, type] = {}

log = logging.getLogger("hvdplus")

_LossScale = keras.optimizers.LossScaleOptimizer


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
        """Whether the last ``apply()`` closed a window; inside one, gradients are only added up."""
        return self._exchanger.updated

    def stats(self) -> dict[str, float | int | None]:
        """Return totals since wrapping: steps, collectives, bytes, seconds, relative error."""
        return self._exchanger.stats.to_dict()

    def verify(self) -> None:
        """Compare all weights across ranks now; all ranks call it together.

        Raises:
            ExchangeError: they differ.
        """
        self._exchanger.verify()

    def broadcast(self, root_rank: int = 0) -> None:
        """Give every rank the weights and optimizer state of one; all ranks call it together."""
        self._exchanger.broadcast(root_rank)

    def residuals(self) -> dict[str, NumPyArray]:
        """Return a copy of what this rank has not delivered yet, by variable, in the unit of true gradients."""
        memory = self._exchanger.memory
        return {} if memory is None else memory.residuals()

    def residual_norm(self) -> float:
        """Return the Euclidean norm of all this rank's residuals; 0 where codecs keep nothing."""
        memory = self._exchanger.memory
        return 0.0 if memory is None else memory.norm()

    def clear_residuals(self) -> None:
        """Forget what this rank has not delivered, as after weights were set by hand."""
        if self._exchanger.memory is not None:
            self._exchanger.memory.clear()

    def consolidate(self) -> None:
        """Give every rank the mean of all ranks' residuals, so that one of them may save for all.

        All ranks call it together. Nothing that was to be delivered is lost; training goes on from the mean.
        """
        if self._exchanger.memory is not None:
            self._exchanger.memory.consolidate()

    def join(self) -> None:
        """Say that this rank has no more data; it follows the others' updates until all have said so.

        ``fit`` says it at its end, and the callbacks of ``hvdplus.keras.callbacks`` at the end of an epoch. A loop
        of your own says it itself, where ranks may have different numbers of batches.
        """
        self._exchanger.join()


class Distributed:
    """What a wrapped optimizer's class has before the class it had: it exchanges gradients before they are applied."""

    hvdplus: Attachment

    def build(self, variables: Sequence[Any]) -> None:
        """Make the optimizer's variables, and those of the exchange."""
        exchanger = of(self)
        if not variables:  # Keras does so when it loads an .h5 file, and could then not build it for the real ones
            return
        super().build(variables)  # type: ignore[misc]
        if not exchanger.adopted:
            exchanger.adopt(variables)
        _restore(self, exchanger)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Average the gradients over ranks and micro-batches, and update the variables if an update is due."""
        exchanger = of(self)
        if exchanger.inside:
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        return exchanger.apply(grads, trainable_variables, self, super().apply)  # type: ignore[misc]

    def register_local_var(self, var: Any) -> None:
        """Leave a variable to this rank alone (Horovod's name): nothing of it is exchanged, copied or compared.

        Its gradient is divided by the number of ranks, unless ``scale_local_gradients=False``.
        """
        exchanger = of(self)
        exchanger.keep_local(var, 1.0 / exchanger.collectives.size if exchanger.scale_local else 1.0)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """End a ``fit``: follow the ranks that still have data, then do what the optimizer does."""
        of(self).join(var_list)
        super().finalize_variable_values(var_list)  # type: ignore[misc]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set all variables, as they are listed in ``variables``; those that are not made yet, once they are."""
        of(self).weights = [np.array(weight) for weight in weights]
        if of(self).adopted:
            _restore(self, of(self))

    def save_own_variables(self, store: Any) -> None:
        """Save the optimizer's variables by number as ever, and by names what was added to them."""
        exchanger = of(self)
        _save(exchanger.without_added(self.variables), store)  # type: ignore[attr-defined]
        for key, value in ({} if exchanger.memory is None else exchanger.memory.saved()).items():
            store[key] = value

    def load_own_variables(self, store: Any) -> None:
        """Load both; what codecs keep follows the rules of ``hvdplus.state.share``."""
        exchanger = of(self)
        fits = _load(exchanger.without_added(self.variables), store, self)  # type: ignore[attr-defined]
        if exchanger.memory is not None:
            kept = {key: store[key] for key in store.keys()}  # noqa: SIM118 - a store is no dict
            exchanger.memory.load(kept if fits else {})

    def get_config(self) -> dict[str, Any]:
        """Return what ``from_config`` needs: the optimizer as it was, and the strategy."""
        exchanger = of(self)
        plain = _CLASSES_BACK[type(self)].from_config(super().get_config())  # type: ignore[misc]
        return {
            "name": _MISSING,
            "optimizer": keras.saving.serialize_keras_object(plain),
            "strategy": exchanger.strategy.to_dict(),
            "sum_passes": exchanger.sum_passes,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Make the optimizer that was saved, and wrap it."""
        plain = copy.deepcopy(config["optimizer"])  # Keras writes into what it is given
        optimizer = keras.saving.deserialize_keras_object(plain, custom_objects=custom_objects)
        return _wrap(optimizer, None, Strategy.from_dict(config["strategy"]), sum_passes=config["sum_passes"])


_CLASSES_BACK: dict[type, Any] = {}


def _restore(optimizer: Any, exchanger: Exchanger) -> None:
    """Set the variables that were given before there were any."""
    if not exchanger.weights or exchanger.owner is not optimizer:
        return
    given, exchanger.weights = exchanger.weights, []
    with exchanger.backend.outside():  # assigned in the graph of a step, they would be so in every step
        _set(optimizer, exchanger, given)


def _set(optimizer: Any, exchanger: Exchanger, given: Sequence[NumPyArray]) -> None:
    """Set all variables, or if what was added to them has changed, the optimizer's own."""
    variables = list(optimizer.variables)
    if _alike(variables, given):
        _assign(variables, given)
        if exchanger.memory is not None:
            exchanger.memory.settle()
        return
    plain = exchanger.without_added(variables)
    added = len(variables) - len(plain)
    begin = next((i for i, v in enumerate(plain) if v is not variables[i]), len(plain))
    rest = [*given[:begin], *given[len(given) - len(variables) + begin + added :]]
    if not added or not _alike(plain, rest):
        log.warning("hvdplus: the saved optimizer has other variables than %s; it starts anew.", optimizer.name)
        return
    _assign(plain, rest)
    log.warning(
        "hvdplus: what codecs kept of %s was saved by another number of ranks or in another strategy, and starts anew; "
        "a .keras file would carry it over.", optimizer.name,
    )  # fmt: skip


def _alike(variables: Sequence[Any], values: Sequence[Any]) -> bool:
    return [tuple(v.shape) for v in variables] == [tuple(np.shape(value)) for value in values]


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _save(variables: Sequence[Any], store: Any) -> None:
    """Save variables as Keras does."""
    for index, variable in enumerate(variables):
        store[str(index)] = variable.numpy()


def _load(variables: Sequence[Any], store: Any, optimizer: Any) -> bool:
    """Load them, where there are as many; return whether there were."""
    count = sum(key.isdigit() for key in store.keys())  # noqa: SIM118
    if count != len(variables):
        log.warning(
            "hvdplus: the saved optimizer has %d variables, and %s has %d; it starts anew.",
            count, optimizer.name, len(variables),
        )  # fmt: skip
        return False
    _assign(variables, [store[str(index)] for index in range(count)])
    return True


def of(optimizer: Any) -> Exchanger:
    """Return the exchanger of a wrapped optimizer."""
    return cast(Exchanger, optimizer.hvdplus._exchanger)


def find(optimizer: Any) -> Exchanger | None:
    """Return the exchanger of an optimizer or of one that it scales the loss for; None where nothing is wrapped."""
    while optimizer is not None:
        if isinstance(optimizer, Distributed):
            return of(optimizer)
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


def shared(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return those of ``variables`` that are no rank's own, such as what the optimizer's codecs did not deliver."""
    exchanger = find(optimizer)
    return list(variables) if exchanger is None else exchanger.without_own(variables)


def _class(base: type) -> type:
    """Return the wrapped form of an optimizer's class, a subclass of it.

    All of them are registered under one name, which stands for any of them: what was wrapped is in the config.
    """
    if base not in _CLASSES:
        made = type(f"Distributed{base.__name__}", (Distributed, base), {"__module__": "hvdplus.keras"})
        _CLASSES[base] = keras.saving.register_keras_serializable(_PACKAGE, _NAME)(made)
        _CLASSES_BACK[made] = base
    return _CLASSES[base]


def wrap(
    optimizer: Any,
    *,
    model: Any = None,
    named_parameters: Any = None,
    strategy: Strategy | str | None = None,
    **fields: Any,
) -> Any:
    """Make a Keras optimizer exchange with all ranks; see ``hvdplus.wrap``."""
    if named_parameters is not None:
        raise StrategyError("named_parameters= is for torch optimizers; Keras variables have names, pass model= here.")
    return _wrap(optimizer, model, Strategy.of(strategy, **fields))


def DistributedOptimizer(  # noqa: N802 - Horovod's name and arguments
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
    *,
    model: Any = None,
    strategy: Strategy | str | None = None,
    **fields: Any,
) -> Any:
    """Horovod's ``DistributedOptimizer``, which returns the optimizer it was given.

    Horovod's meaning holds: ``backward_passes_per_step=k`` adds up k passes and averages over ranks, or averages both
    with ``average_aggregated_gradients=True``, as the strategy's ``accumulate=k`` does. ``device_dense``,
    ``device_sparse``, ``gradient_predivide_factor``, ``num_groups``, ``groups`` and ``sparse_as_dense`` are
    accepted: sums cannot overflow where their mean does not, buckets group by
    themselves, and sparse gradients travel dense.

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
    sums = backward_passes_per_step > 1 and not average_aggregated_gradients
    wrapped = _wrap(optimizer, model, chosen, process_set, sums)
    if name is not None:
        wrapped.name = name
    of(wrapped).scale_local = scale_local_gradients
    return wrapped


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """``DistributedOptimizer`` that leaves the weights of some layers to each rank alone.

    Args:
        optimizer: the optimizer.
        *args: as for ``DistributedOptimizer``.
        local_layers: a layer or several.
        **kwargs: as for ``DistributedOptimizer``.
    """
    layers = [] if local_layers is None else local_layers
    layers = layers if isinstance(layers, list | tuple | set) else [layers]
    if any(not isinstance(layer, keras.layers.Layer) for layer in layers):
        raise StrategyError(f"local_layers={local_layers!r} must be a keras.layers.Layer or several.")
    wrapped = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in (variable for layer in layers for variable in layer.trainable_weights):
        wrapped.register_local_var(variable)
    return wrapped


def _wrap(optimizer: Any, model: Any, strategy: Strategy, process_set: Any = None, sum_passes: bool = False) -> Any:
    """Give the optimizer the wrapped form of its class. It stays the object it is, with all its state."""
    _check_optimizer(optimizer, strategy)
    _check_model(model)
    chosen = backend()
    group = _group(chosen.session(), process_set)
    numbers = (
        sum(math.prod(v.shape) for v in model.trainable_variables) if model is not None and model.built else _MODEL
    )
    strategy = autotune.chosen(strategy, chosen.session(), group, numbers)
    exchanger = Exchanger(optimizer, model, strategy, chosen, group, str(next(_SCOPES)), sum_passes)
    optimizer.hvdplus = Attachment(exchanger)
    optimizer.__class__ = _class(type(optimizer))
    exchanger.update = super(Distributed, optimizer).apply
    if model is not None:
        _prepare(optimizer, exchanger, model)
    return optimizer


def _prepare(optimizer: Any, exchanger: Exchanger, model: Any) -> None:
    """Start equal on all ranks before the first forward, and keep the model's steps out of compilers."""
    if exchanger.collectives.size > 1 or exchanger.window > 1:
        model.supports_jit = False
        if model.compiled and model.jit_compile:
            model.jit_compile = False
    if not model.built:
        return  # it will have variables when the optimizer is built
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    elif not exchanger.adopted:
        exchanger.adopt(model.trainable_variables)


def _check_optimizer(optimizer: Any, strategy: Strategy) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise StrategyError(
            f"optimizer={optimizer!r} is a {type(optimizer).__module__}.{type(optimizer).__qualname__}, not a "
            f"keras.optimizers.Optimizer; pass the optimizer itself."
        )
    if find(optimizer) is not None:
        raise StrategyError(f"this {optimizer.name} is wrapped already; wrap an optimizer once.")
    inner: Any = optimizer
    while inner is not None:
        steps = getattr(inner, "gradient_accumulation_steps", None)
        if steps and strategy.accumulate > 1:
            raise StrategyError(
                f"the optimizer has gradient_accumulation_steps={steps} and the strategy accumulate="
                f"{strategy.accumulate}, which would multiply; leave one of them out."
            )
        inner = getattr(inner, "inner_optimizer", None)


def _check_model(model: Any) -> None:
    if model is not None and not isinstance(model, keras.Model):
        raise StrategyError(f"model={model!r} is a {type(model).__name__}, not a keras.Model; pass the model or None.")


def _group(session: Session[Any], process_set: Any) -> Collectives[Any]:
    if process_set is None or getattr(process_set, "process_set_id", None) == 0:
        return session.collectives
    if session.engine != "horovod":
        raise StrategyError(f"process_set= needs engine 'horovod', and this job runs on {session.engine!r}.")
    return backend().group(process_set) if process_set.included() else LocalCollectives()


# -- loss scaling around a wrapped optimizer ------------------------------------------------------------------

_loss_scale_apply = _LossScale.apply
_loss_scale_build = _LossScale.build
_loss_scale_finalize = _LossScale.finalize_variable_values
_loss_scale_set_weights = _LossScale.set_weights
_loss_scale_save = _LossScale.save_own_variables
_loss_scale_load = _LossScale.load_own_variables


@functools.wraps(_loss_scale_apply)
def _apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
    exchanger = find(self.inner_optimizer)
    if exchanger is None or exchanger.inside:
        return _loss_scale_apply(self, grads, trainable_variables)
    return exchanger.apply(grads, trainable_variables, self, partial(_loss_scale_apply, self))


@functools.wraps(_loss_scale_build)
def _build(self: Any, var_list: Sequence[Any]) -> None:
    exchanger = find(self.inner_optimizer)
    if exchanger is None:
        _loss_scale_build(self, var_list)
    elif var_list:
        exchanger.owner = self
        _loss_scale_build(self, var_list)
        _restore(self, exchanger)


@functools.wraps(_loss_scale_set_weights)
def _set_weights(self: Any, weights: Sequence[Any]) -> None:
    exchanger = find(self.inner_optimizer)
    if exchanger is None:
        _loss_scale_set_weights(self, weights)
    else:
        exchanger.weights, exchanger.owner = [np.array(weight) for weight in weights], self
        if self.built:
            _restore(self, exchanger)


@functools.wraps(_loss_scale_save)
def _save_own(self: Any, store: Any) -> None:
    if find(self.inner_optimizer) is None:
        _loss_scale_save(self, store)
    else:  # the inner optimizer saves its own
        _save(_outer(self), store)


@functools.wraps(_loss_scale_load)
def _load_own(self: Any, store: Any) -> None:
    if find(self.inner_optimizer) is None:
        _loss_scale_load(self, store)
    else:
        _load(_outer(self), store, self)


def _outer(loss_scale: Any) -> list[Any]:
    """Return the variables that are not the inner optimizer's."""
    inner = {id(variable) for variable in loss_scale.inner_optimizer.variables}
    return [variable for variable in loss_scale.variables if id(variable) not in inner]


@functools.wraps(_loss_scale_finalize)
def _finalize(self: Any, var_list: Sequence[Any]) -> None:
    exchanger = find(self.inner_optimizer)
    if exchanger is not None:
        exchanger.owner, exchanger.update = self, partial(_loss_scale_apply, self)
    _loss_scale_finalize(self, var_list)


# A loss scaling decides by the gradients whether to skip a step, and it may be around ours: compile() puts one there
# under mixed_float16. It has to decide by the averaged gradients, alike on all ranks, so what is inside it has to
# exchange first; and nothing inside it is asked before it decides.
_LossScale.apply = _apply
_LossScale.build = _build
_LossScale.set_weights = _set_weights
_LossScale.save_own_variables = _save_own
_LossScale.load_own_variables = _load_own
_LossScale.finalize_variable_values = _finalize

_class(keras.optimizers.Optimizer)  # registers the name, so that models can be loaded
