"""Averages one Keras optimizer's gradients inside ``apply``: the window, the packing, and the checks between ranks."""

from __future__ import annotations

import contextlib
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops

from hvdplus.agreement import agree, check_every, describe
from hvdplus.arrays import NumPyArray
from hvdplus.collectives import Collectives
from hvdplus.errors import ExchangeError, StrategyError
from hvdplus.plan import Member, Parameter, Plan, plan
from hvdplus.session import Session
from hvdplus.stats import Stats
from hvdplus.strategy import Strategy
from hvdplus_keras._backend import Backend, Exchange
from hvdplus_keras._state import Memory

log = logging.getLogger("hvdplus")

Update = Callable[[list[Any], list[Any]], Any]

_COMPILED = (
    "jit_compile=True compiles the training step, and a compiled step cannot hold an exchange between ranks; use "
    "model.compile(..., jit_compile=False), or give wrap() the model and leave jit_compile out."
)
_DTYPES = ("float16", "bfloat16", "float32", "float64")


class Exchanger:
    """Everything behind ``optimizer.hvdplus``.

    Gradients are packed into the plan's buckets. Behind the last one's usage flags travels a note: this rank's
    weight, 1 with a whole window of data and 0 where it has run out; where the mean weight is below 1, the mean is
    taken over those that have data.

    ``apply`` may be traced into a graph, once for many steps. What Python has to decide at each step, it decides in
    the hooks ``_before`` and ``_after``.
    """

    def __init__(
        self,
        optimizer: Any,
        model: Any,
        strategy: Strategy,
        backend: Backend,
        collectives: Collectives[Any],
        scope: str,
        sum_passes: bool,
    ) -> None:
        self.optimizer, self.model, self.strategy = optimizer, model, strategy
        self.backend, self.session, self.collectives = backend, backend.session(), collectives
        self.scope, self.sum_passes = scope, sum_passes
        self.owner = optimizer  # the outermost optimizer: a loss scaling may be around ours
        self.update: Update | None = None
        self.weights: list[Any] = []  # values for variables that are not made yet
        self.inside = False  # an update is under way: gradients that come in are averaged already
        self.stats = Stats()
        self.updates = 0
        self.updated = False
        self.check_every = check_every()
        self._variables: list[Any] = []
        self._index: dict[int, int] = {}
        self._local: dict[int, Any] = {}  # variables of this rank alone, by id
        self._local_scale = 1.0
        self.scale_local = True  # whether the gradients of those are divided by the number of ranks
        self._own: list[Any] = []  # state that differs between ranks
        self.memory: Memory | None = None
        self._accumulators: list[Any] = []
        self._micro: Any = None
        self._steps: Any = None
        self._plan = Plan((), ())
        self._exchange: Exchange | None = None
        self._checked = False
        self._root_only = False
        self._weight = 1.0  # the last exchange's
        self._traced_use: dict[int, bool] = {}  # by variable: whether this rank has a gradient, as traced into a graph
        self._followed = False  # since the last join, an update was made without some ranks' data

    # -- variables --------------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """Micro-batches to an update."""
        return self.strategy.accumulate

    @property
    def adopted(self) -> bool:
        """Whether the variables are known."""
        return bool(self._variables)

    def adopt(self, variables: Sequence[Any]) -> None:
        """Plan the exchange of these variables, and make the state it needs as variables of the optimizer."""
        self._variables = list(variables)
        for index, variable in enumerate(self._variables):
            self._index[id(variable)] = index
            self._index.setdefault(id(getattr(variable, "value", variable)), index)
        strategy = (
            self.strategy if self.collectives.size > 1 else Strategy.of(self.strategy, codec="exact", overrides={})
        )
        described = _described(self._variables)
        self._plan = plan(
            [
                replace(p, shape=(0,)) if self._is_local(v) else p
                for p, v in zip(described, self._variables, strict=True)
            ],
            strategy,
            notes=1,
        )
        if not self._plan.buckets:
            return
        self._steps = self.optimizer.add_variable((), "zeros", "int64", name="hvdplus_exchanges")
        if self.window > 1:
            self._micro = self._own_variable("micro_batches", (), "int64")
            flats = [(f"window_{b.index}", b.count, b.dtype) for b in self._plan.buckets]
            flats += [(f"local_{i}", described[i].count, described[i].dtype) for i in self._local_places()]
            self._accumulators = [self._own_variable(name, (count,), dtype) for name, count, dtype in flats]
        self._exchange = self.backend.exchange(
            self._plan, strategy, self.collectives, self.scope, self.stats, self._before, self._after, self._new_state
        )
        windows = [self._micro, *self._accumulators] if self.window > 1 else []
        self.memory = Memory(
            self._plan, self._exchange.reducer, self._steps, windows, self._add_own, self.session, self.collectives
        )
        if self.model is not None and self.backend.eager():  # in a graph they have no values yet: see _compare
            self.broadcast()

    def keep_local(self, variable: Any, scale: float) -> None:
        """Leave a variable to this rank alone; its gradient is multiplied by ``scale``.

        Raises:
            StrategyError: the variables are planned already.
        """
        if self.adopted:
            raise StrategyError(
                f"variable {_name(variable)!r} cannot become local now; register it before the first apply(), and "
                f"without model= in wrap()."
            )
        self._local[id(variable)] = variable
        self._local_scale = scale

    def _is_local(self, variable: Any) -> bool:
        return id(variable) in self._local or id(getattr(variable, "value", variable)) in self._local

    def _local_places(self) -> list[int]:
        return [index for index, variable in enumerate(self._variables) if self._is_local(variable)]

    def _common(self) -> list[Any]:
        """The variables that are to be equal on all ranks."""
        return [variable for variable in self._variables if not self._is_local(variable)]

    def _own_variable(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        return self._add_own(shape, "zeros", dtype, name)

    def _add_own(self, shape: tuple[int, ...], initial: Any, dtype: str, name: str) -> Any:
        variable = self.optimizer.add_variable(shape, initial, dtype, name=f"hvdplus_{name}")
        self._own.append(variable)
        return variable

    def _new_state(self, name: str, size: int, dtype: str) -> Any:
        return self._own_variable(f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}", (size,), dtype)

    def _shared(self) -> list[Any]:
        """The optimizer's variables that must be equal on all ranks."""
        return self.without_own(self.owner.variables)

    def without_own(self, variables: Sequence[Any]) -> list[Any]:
        """Return those that are not this rank's alone."""
        own = {id(variable) for variable in self._own}
        return [variable for variable in variables if id(variable) not in own]

    def without_added(self, variables: Sequence[Any]) -> list[Any]:
        """Return those that the optimizer would have without an exchange."""
        return [variable for variable in self.without_own(variables) if variable is not self._steps]

    # -- apply ------------------------------------------------------------------------------------------------

    def apply(self, grads: Sequence[Any], variables: Sequence[Any] | None, owner: Any, update: Update) -> None:
        """Average the gradients of a full window and hand them to ``update``; inside a window, only add them up."""
        self.owner, self.update = owner, update
        grads = list(grads)
        known = self._known(variables)
        alone = self.collectives.size == 1 and self.window == 1
        compiled = self.backend.compiled()
        if compiled and not alone:
            raise StrategyError(_COMPILED)
        if not grads or alone or self._exchange is None:  # one rank is the plain optimizer
            self._update(grads, known)
            if not compiled:
                self.backend.call(self._count_alone, [])
        elif self.window == 1:
            self._exchange_and_update(self._pack(grads, known), _used(grads), known)
        else:
            self._accumulate(self._pack(grads, known), _used(grads), known)

    def _known(self, variables: Sequence[Any] | None) -> list[Any]:
        """Return the variables as a list; the first time, make them known to the optimizer and to us."""
        if variables is None:
            if not self.adopted:
                raise StrategyError(
                    "apply(grads) without variables needs to know them; call optimizer.build(variables) first or pass "
                    "model= to wrap()."
                )
            return self._variables
        listed = list(variables)
        if not self.owner.built:
            self.owner.build(listed)
        if not self.adopted:
            self.adopt(listed)
        return listed

    def _accumulate(self, values: list[Any], used: list[bool], variables: list[Any]) -> None:
        totals = [ops.add(total, value) for total, value in zip(self._accumulators, values, strict=True)]

        def close() -> Any:
            self._clear()
            self._exchange_and_update(self._scaled(totals), used, variables)
            return True

        def keep() -> Any:
            for accumulator, total in zip(self._accumulators, totals, strict=True):
                accumulator.assign(total)
            self._micro.assign_add(1)
            return self.backend.call(self._held, [])

        closing = ops.equal(ops.convert_to_tensor(self._micro), self.window - 1)
        ops.cond(closing, close, keep)

    def _clear(self) -> None:
        """Begin a new window; assigned, since a product with 0 would keep a NaN."""
        for accumulator in self._accumulators:
            accumulator.assign(ops.zeros(accumulator.shape, accumulator.dtype))
        self._micro.assign(0)

    def _scaled(self, totals: list[Any]) -> list[Any]:
        """Turn a window's sums into its means, unless micro-batches are added up."""
        if self._sums:
            return totals
        return [ops.multiply(total, ops.cast(1.0 / self.window, total.dtype)) for total in totals]

    @property
    def _sums(self) -> bool:
        return self.sum_passes or self.strategy.op == "sum"

    def _exchange_and_update(self, values: list[Any], used: list[bool] | None, variables: list[Any]) -> None:
        assert self._exchange is not None
        count = len(self._plan.buckets)
        means, due = self._exchange(values[:count], ops.convert_to_tensor(self._steps), self._loss_scale())
        self._steps.assign_add(1)
        self._update(self._unpack(means, values[count:], used, variables), variables)
        self._look_after(due)

    def _loss_scale(self) -> Any:
        """Return by what a loss scaling has multiplied the gradients that come in; None where there is none."""
        optimizer = self.owner
        while optimizer is not None:
            if getattr(optimizer, "dynamic_scale", None) is not None:
                return ops.convert_to_tensor(optimizer.dynamic_scale)
            optimizer = getattr(optimizer, "inner_optimizer", None)
        return None

    def _update(self, grads: list[Any], variables: list[Any]) -> None:
        """Let the user's own optimizer act."""
        assert self.update is not None
        with self._being_inside():
            self.update(grads, variables)

    @contextlib.contextmanager
    def _being_inside(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    # -- packing ----------------------------------------------------------------------------------------------

    def _place(self, variable: Any) -> int:
        if id(variable) not in self._index:
            raise StrategyError(
                f"variable {_name(variable)!r} is unknown: the optimizer was built for other variables; make a new "
                f"optimizer for a new set of variables, and wrap it."
            )
        return self._index[id(variable)]

    def _pack(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Lay gradients out in buckets, with flags and this rank's weight behind the last."""
        assert self._exchange is not None
        given = {self._place(v): self.backend.dense(g) for g, v in zip(grads, variables, strict=True) if g is not None}
        flags = [float(index in given) for index in range(len(self._variables))] + [1.0]
        values = []
        for bucket in self._plan.buckets:
            parts = [_flat(given.get(member.index), member, bucket.dtype) for member in bucket.members]
            if bucket.flags:
                parts.append(ops.convert_to_tensor(flags, dtype=bucket.dtype))
            values.append(self._exchange.joined(parts, bucket))
        local = [self._local_flat(given.get(index), index) for index in self._local_places()]
        if local:  # a loss scaling looks at them, too, and must find the same on all ranks
            alarm = sum(ops.cast(ops.sum(ops.multiply(flat, 0)), values[0].dtype) for flat in local)
            values[0] = ops.add(values[0], alarm)
        return [*values, *local]

    def _local_flat(self, gradient: Any, index: int) -> Any:
        described = _parameter(self._variables[index])
        flat = _flat(gradient, Member(index, described.name, 0, described.count), described.dtype)
        return ops.multiply(flat, ops.cast(self._local_scale, flat.dtype))

    def _unpack(self, means: list[Any], local: list[Any], used: list[bool] | None, variables: list[Any]) -> list[Any]:
        """Return the mean gradient of each variable; None where no rank has one.

        In a graph that is known of this rank alone, and ``_after`` sees to it that the ranks are alike.
        """
        means = self._per_data(means)
        wanted = [self._place(variable) for variable in variables]
        self._traced_use = {} if self.backend.eager() else dict(zip(wanted, used or [], strict=True))
        if self.backend.eager():
            flags = self._tail(means)
            used = [bool(flags[index] != 0) for index in wanted]
        assert used is not None
        pieces: dict[int, Any] = {}
        for bucket, mean in zip(self._plan.buckets, means, strict=True):
            for m in bucket.members:
                shape = tuple(self._variables[m.index].shape)
                pieces[m.index] = ops.reshape(mean[m.offset : m.offset + m.count], shape)
        for index, flat in zip(self._local_places(), local, strict=False):
            pieces[index] = ops.reshape(flat, tuple(self._variables[index].shape))
        return [self._piece(pieces, index) if use else None for index, use in zip(wanted, used, strict=True)]

    def _piece(self, pieces: dict[int, Any], index: int) -> Any:
        """Return one mean; an empty variable has nothing to exchange."""
        if index in pieces:
            return pieces[index]
        variable = self._variables[index]
        return ops.zeros(variable.shape, variable.dtype)

    def _tail(self, means: list[Any]) -> NumPyArray:
        last = self._plan.buckets[-1]
        tail: NumPyArray = ops.convert_to_numpy(means[-1][last.flags_offset :])
        return tail

    def _per_data(self, means: list[Any]) -> list[Any]:
        """Turn a mean over all ranks into one over those that have data, where some have run out."""
        if self._sums or self.collectives.size == 1:
            return means
        weight = means[-1][-1]
        whole = ops.greater_equal(weight, ops.cast(1.0, weight.dtype))
        divided = lambda: [ops.divide(mean, ops.cast(weight, mean.dtype)) for mean in means]  # noqa: E731
        answer = ops.cond(whole, lambda: list(means), divided)
        return list(answer) if isinstance(answer, list | tuple) else [answer]

    # -- what Python decides at each step ---------------------------------------------------------------------

    def _before(self) -> float:
        """As an exchange begins: the first time, see that the ranks belong together."""
        if not self._checked and self.collectives.size > 1:
            self._checked = True
            self._agree()
            self._compare()
        if not self._root_only:
            return 1.0
        return float(self.collectives.size) if self.collectives.rank == 0 else 0.0

    def _after(self, tail: NumPyArray) -> bool:
        """As an exchange ends: look at flags and weight; return whether the variables are to be looked at."""
        unit = (self.window if self._sums else 1) * (self.collectives.size if self.strategy.op == "sum" else 1)
        self._weight = float(tail[-1]) / unit
        if self._weight == 0:  # nobody has anything left: this one is no step
            return False
        self.updated = True
        self.updates += 1
        self._followed |= self._weight < 1
        self._check_use(tail[: len(self._variables)] / (unit * self._weight))
        return self._root_only or self.updates == 1 or bool(self.check_every and self.updates % self.check_every == 0)

    def _check_use(self, shares: NumPyArray) -> None:
        """Refuse a traced step in which some ranks have a gradient for a variable and others have None.

        Raises:
            ExchangeError: it is so; ranks without one would leave the variable alone, and the others not.
        """
        for index, mine in self._traced_use.items():
            if (not mine and shares[index] > 0) or (mine and self.window == 1 and shares[index] < 1 - 1e-3):
                raise ExchangeError(
                    f"variable {_name(self._variables[index])!r} has {'a' if mine else 'no'} gradient on rank "
                    f"{self.session.world.rank} and on {shares[index]:.0%} of all ranks in a traced step; use it on "
                    f"all ranks (add 0 times it to the loss), or train with run_eagerly=True."
                )

    def _held(self) -> bool:
        self.updated = False
        return False

    def _count_alone(self) -> bool:
        self.stats.steps += 1
        self.updates += 1
        self.updated = True
        return False

    def _look_after(self, due: Any) -> None:
        """After an update, let Python look at the variables if it is due."""
        if self.collectives.size == 1:
            return
        look = lambda: self.backend.call(self._look, [ops.convert_to_tensor(v) for v in self._watched()])  # noqa: E731
        ops.cond(due, look, lambda: ops.equal(0, 1))

    def _watched(self) -> list[Any]:
        return [*self._common(), *self._shared()]

    def _whole(self) -> list[Any]:
        """All that is copied from one rank: weights (no state of random numbers) and what optimizers share."""
        of_model = self.model.weights if self.model is not None else []
        return list({id(v): v for v in [*of_model, *self._watched()] if not self._is_local(v)}.values())

    def _look(self, *values: NumPyArray) -> bool:
        """Take rank 0's variables after a step that was its alone, and compare them across ranks."""
        if self._root_only:
            self._root_only = False
            copy_from(self.session, self._whole(), 0, self.collectives)
            values = tuple(ops.convert_to_numpy(variable) for variable in self._watched())
        self._verify(values[: len(self._common())])
        return True

    # -- agreement --------------------------------------------------------------------------------------------

    def _gather(self, payload: bytes) -> list[bytes]:
        return self.session.gather(payload, self.collectives)

    def _agree(self) -> None:
        """Compare plan and strategy."""
        alike = [replace(p, name=_lasting(p.name)) for p in self._plan.parameters]
        kind = type(self.optimizer).__bases__[-1].__name__
        owner = f"{kind}, wrapped as number {self.scope}"
        assert self._exchange is not None
        plan = replace(self._plan, parameters=tuple(alike))
        items = describe(plan, self.strategy, owner, self._sums, self._exchange.asks)
        self.session.watch.at(self.stats.steps, f"the agreement of optimizer {self.scope}")
        agree(items, self._gather, "all ranks must build the same model, optimizer and strategy in the same order")

    def _compare(self) -> None:
        """Do all ranks have the same weights and optimizer state? If not, this step is rank 0's alone."""
        mine = _checksum([ops.convert_to_numpy(variable) for variable in self._watched()])
        if len(set(self._gather(str(mine).encode()))) > 1:
            self._root_only = True
            log.warning(
                "rank %d: weights or optimizer state differ between ranks at the first step; taking rank 0's, and its "
                "gradient alone for this step. Pass model= to wrap() to start equal.",
                self.session.world.rank,
            )

    def verify(self) -> None:
        """Compare the variables across ranks now; all ranks call it together.

        Raises:
            ExchangeError: they differ; it names the first variable and the ranks.
        """
        if self.collectives.size > 1:
            self._verify([ops.convert_to_numpy(variable) for variable in self._common()])

    def _verify(self, values: Sequence[NumPyArray]) -> None:
        self.session.watch.at(self.stats.steps, "the comparison of weights")
        items = [
            (f"variable {_lasting(_name(v))} with checksum", f"{_checksum([value]):08x}")
            for v, value in zip(self._common(), values, strict=True)
        ]
        agree(items, self._gather, f"their weights must be equal after update {self.updates}, and are not")
        self.session.watch.at(self.stats.steps, "outside an exchange")

    def broadcast(self, root: int = 0) -> None:
        """Give every rank ``root``'s weights and optimizer state; all ranks call it together."""
        if self.collectives.size == 1:
            return
        if not self._checked:
            self._checked = True
            self._agree()
        copy_from(self.session, self._whole(), root, self.collectives)

    # -- the end of the data ----------------------------------------------------------------------------------

    def join(self, variables: Sequence[Any] | None = None) -> None:
        """Say that this rank has no more data: follow the others' updates until all have said so.

        Raises:
            ExchangeError: another rank failed, or left without a word.
        """
        if self.collectives.size == 1 or (variables is None and not self.adopted):
            return
        self._known(variables)
        if self._exchange is None:
            return
        while self._follow():
            pass
        if self._close_windows() or self._followed:
            self._followed = False
            self._level()

    def _follow(self) -> bool:
        """Take part in one exchange with nothing to give; return whether anybody had something."""
        assert self._exchange is not None
        before = replace(self.stats)
        values = [ops.zeros((bucket.count,), bucket.dtype) for bucket in self._plan.buckets]
        means, due = self._exchange(values, ops.convert_to_tensor(self._steps), self._loss_scale())
        if self._weight == 0:
            vars(self.stats).update(vars(before))
            return False
        self._steps.assign_add(1)
        self._update(self._unpack(means, [], None, self._variables), self._variables)
        self._look_after(due)
        return True

    def _close_windows(self) -> bool:
        """Where the ranks' windows are not equally full, end them with the mean over all micro-batches in them."""
        if self.window == 1:
            return False
        counts = self._gather(str(int(self._micro)).encode())
        if len(set(counts)) == 1:
            return False
        values = self._scaled([ops.copy(ops.convert_to_tensor(a)) for a in self._accumulators])
        self._clear()
        self._exchange_and_update(values, None, self._variables)
        return True

    def _level(self) -> None:
        """Make the last bits equal too: some ranks computed these updates in a graph, others did not."""
        mine = _checksum([ops.convert_to_numpy(variable) for variable in self._watched()])
        if len(set(self._gather(str(mine).encode()))) > 1:
            copy_from(self.session, self._watched(), 0, self.collectives)


def copy_from(
    session: Session[Any], variables: Sequence[Any], root: int = 0, among: Collectives[Any] | None = None
) -> None:
    """Give every rank ``root``'s values of these variables."""
    for variable in variables:
        variable.assign(session.broadcast(ops.convert_to_numpy(variable), root, among))


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def _lasting(name: str) -> str:
    """Return a name without the numbers that Keras gives by itself: they depend on what a rank built before."""
    return re.sub(r"_\d+(?=/|$)", "", name)


def _parameter(variable: Any) -> Parameter:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if dtype not in _DTYPES:
        raise StrategyError(
            f"variable {_name(variable)!r} has dtype {dtype}, which cannot be exchanged; allowed are "
            f"{', '.join(_DTYPES)}."
        )
    return Parameter(_name(variable), tuple(variable.shape), dtype)


def _described(variables: Sequence[Any]) -> list[Parameter]:
    """Describe variables, each with a name of its own."""
    described = [_parameter(variable) for variable in variables]
    names = [parameter.name for parameter in described]
    return [replace(p, name=f"{p.name}#{index}") if names.count(p.name) > 1 else p for index, p in enumerate(described)]


def _used(grads: Sequence[Any]) -> list[bool]:
    return [gradient is not None for gradient in grads]


def _flat(gradient: Any, member: Member, dtype: str) -> Any:
    if gradient is None:
        return ops.zeros((member.count,), dtype)
    return ops.cast(ops.reshape(gradient, (-1,)), dtype)


def _checksum(arrays: Sequence[NumPyArray]) -> int:
    seed = 0
    for array in arrays:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        seed = zlib.crc32(raw.tobytes(), zlib.crc32(str(array.shape).encode(), seed))
    return seed
