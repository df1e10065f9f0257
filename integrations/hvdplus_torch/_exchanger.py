"""Averages one optimizer's gradients in the course of backward, and decides what ``step`` and ``zero_grad`` mean."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hvdplus.agreement import check_every
from hvdplus.collectives import Collectives
from hvdplus.errors import ExchangeError, StrategyError
from hvdplus.reducer import Reducer, Window
from hvdplus.stats import Stats
from hvdplus.strategy import Strategy
from hvdplus_torch._arrays import TorchArrays
from hvdplus_torch._broadcast import object_from
from hvdplus_torch._consensus import Consensus
from hvdplus_torch._hooks import Hooks, in_reentrant_checkpoint
from hvdplus_torch._layout import Layout, check_shape, lay_out
from hvdplus_torch._scaler import ScalerGuard
from hvdplus_torch._session import Session
from hvdplus_torch._state import Memory

log = logging.getLogger("hvdplus")

_NOTED = 8  # counts travel modulo this, so that halves hold them exactly
_KEPT_LAYOUTS = 2  # two parts of a model that are frozen in turn need no new buffers each time


@dataclass
class _Built:
    """A layout, which one it is, and the reducer that exchanges it."""

    number: int
    layout: Layout
    reducer: Reducer[torch.Tensor]


class Exchanger:
    """Everything behind ``optimizer.hvdplus``.

    After the last ``backward()`` of a window, every ``p.grad`` is a view into its bucket and holds the mean over
    micro-batches and ranks. Inside a window ``p.grad`` is None and the bucket accumulates, so that nothing
    (clipping, unscaling) can touch a half-filled window.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[int, str],
        strategy: Strategy,
        session: Session,
        collectives: Collectives[torch.Tensor],
        wire: Collectives[torch.Tensor],
        order: int,
        sum_passes: bool,
    ) -> None:
        self.optimizer, self.strategy, self.order, self.scope = optimizer, strategy, order, str(order)
        self.session, self.collectives, self._wire = session, collectives, wire
        self.window, self.stats = Window(strategy.accumulate), Stats()
        self.updates, self.updated = 0, False
        self.loads = 0  # calls of load_state_dict()
        self._params: list[torch.nn.Parameter] = []
        self._by_name: dict[str, torch.nn.Parameter] = {}
        self._names, self._sum_passes = names, sum_passes
        self.memory = Memory(session, collectives, self._by_name)
        self.consensus = Consensus(optimizer, self._params, names, session, collectives, self.scope)
        self._scaler = ScalerGuard(optimizer)
        self._hooks = Hooks(self, early=strategy.accumulate > 1)
        self._alone = collectives.size == 1 and strategy.accumulate == 1  # the plain optimizer: no hook, no copy
        self._check_every = check_every()
        self._agreed = True
        self._layouts = itertools.count()
        self._built: dict[tuple[bool, ...], _Built] = {}
        self._current: _Built | None = None
        self._flags: tuple[bool, ...] = ()
        self._have: list[bool] = []  # which parameters' gradients are in their buckets
        self._missing: list[int] = []  # how many each bucket waits for
        self._factor = 1.0  # from the sum of micro-batches to their mean
        self._closing = False  # this micro-batch is the window's last
        self._zeroed = True  # zero_grad() came after the last backward
        self._paused = False  # set by no_sync()
        self._root_only = False  # rank 0's gradient makes this step
        self._unfinished = False  # a backward pass was opened and has not ended
        self._before: tuple[int, torch.Tensor] | None = None  # a mean before autograd adds to it
        self._carried = 0  # micro-batches in a mean that a window has gone on from
        self._thrown = 0  # micro-batches thrown away since the last update
        self._unverified = True  # no update since the parameters were given
        self._warned_of_parts = False
        self._warned = False
        self.adopt()

    # -- parameters -------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Take in every parameter of the optimizer that is not known yet."""
        known = {id(p) for p in self._params}
        for g, group in enumerate(self.optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if id(p) not in known:
                    if self.window.full and p.grad is not None:
                        raise StrategyError(
                            f"add_param_group came between backward() and step() with a parameter of shape "
                            f"{tuple(p.shape)} that has a gradient of this rank alone; add it after step() or before "
                            f"backward()."
                        )
                    name = self._names.setdefault(id(p), f"group{g}.param{i}")
                    check_shape(name, p)
                    self._params.append(p)
                    self._by_name[name] = p
        if not self._alone:
            self._hooks.extend(self._params)
        self._built.clear()

    def resize(self, length: int) -> None:
        """Give the windows that follow another number of micro-batches; the ranks compare it at the next backward."""
        self.window.resize(length)
        self.strategy = replace(self.strategy, accumulate=length)
        self._agreed = False
        self._built.clear()
        if length > 1 and not self._hooks.early:
            self._alone, self._hooks.early = False, True
            self._hooks.clear()
            self._hooks.extend(self._params)

    def named(self) -> dict[torch.nn.Parameter, str]:
        """Return the parameters and their names."""
        return {p: self._names[id(p)] for p in self._params}

    # -- backward ---------------------------------------------------------------------------------------------

    def arriving(self, index: int) -> None:
        """Keep the mean that autograd is about to add to: a window that goes on has to turn it into a sum first."""
        if self.window.full and not self._paused and not self._hooks.running:
            grad = self._params[index].grad
            self._before = (index, grad.clone()) if grad is not None and self._is_view(index, grad) else None

    def arrived(self, index: int, p: torch.nn.Parameter) -> None:
        """Take in one parameter's gradient, which autograd has just finished; send its bucket if that is full."""
        if self._paused:
            return
        if not self._hooks.running:
            self._begin(index)
        bucket = self._layout.bucket_of[index]
        if bucket is None:  # it has no elements
            return
        self._take(index, p)
        if not self._closing:
            p.grad = None
            return
        p.grad = self._layout.views[index]
        self._missing[bucket] -= 1
        self._send_full()
        self._reducer.nudge()

    @torch.no_grad()
    def _begin(self, index: int) -> None:
        """Begin with the first parameter that shows itself."""
        self._hooks.open()
        self._scaler.listen()
        if self.window.length > 1 and in_reentrant_checkpoint():
            raise StrategyError(
                f"accumulate={self.window.length} cannot count micro-batches under reentrant activation checkpointing; "
                f"use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        grad = self._params[index].grad
        self._open(carried=grad is not None and self._is_view(index, grad))

    def _is_view(self, index: int, grad: torch.Tensor) -> bool:
        views = self._current.layout.views if self._current else []
        return index < len(views) and grad is views[index]

    def _open(self, carried: bool) -> None:
        """Prepare for one more micro-batch. ``carried``: the last window's mean is still there, to be added to."""
        if self._current is not None and self._reducer.started:
            raise ExchangeError(
                f"rank {self.session.world.rank}: the last backward() ended with an error after "
                f"{self._reducer.started} bucket(s) were sent to the other ranks; this job cannot go on, restart it "
                f"from a checkpoint."
            )
        if self._unfinished:
            self._recover()
        if self.window.full:
            self._reopen(carried)
        self._choose_layout()
        self._unfinished = True
        self._closing = self.window.closing
        self._zeroed = False
        if self._closing:
            self._prepare_to_send(1.0 / (self.window.count + 1))

    def _recover(self) -> None:
        """Forget what a backward that failed has left, where that can be told from what earlier ones have."""
        if self.window.count % self.window.length:
            raise ExchangeError(
                f"rank {self.session.world.rank}: a backward() failed after micro-batch {self.window.count} of "
                f"accumulate={self.window.length}, and part of it is in the sum; throw the window away on all ranks "
                f"with optimizer.zero_grad() before the next backward()."
            )
        self._have = [False] * len(self._params)

    def _reopen(self, carried: bool) -> None:
        """Go on from a full window that had no step: add to it, or drop what was thrown away."""
        if not carried:
            self.discard()
            return
        if self.strategy.op == "sum" and self.collectives.size > 1:
            raise ExchangeError(
                f"rank {self.session.world.rank}: backward() adds to gradients that are summed over ranks already "
                f"(op='sum'), which would count them on every rank; call zero_grad() before it, or take the mean."
            )
        if self.window.length == 1:
            self.window.restart()
            self._reducer.commit()
            return
        self._carried = self.window.count
        if not self._sums:
            self._unaverage()

    def _unaverage(self) -> None:
        """Turn a mean of n back into a sum; it is the same on all ranks, so its mean over ranks is itself."""
        assert self._before is not None  # `arriving` came before the gradient that opened this micro-batch
        index, mean = self._before
        view = self._layout.views[index]
        late = view - mean  # what autograd has added already
        view.copy_(mean)
        for bucket in self._layout.plan.buckets:
            self._layout.scale(bucket.index, self.window.count)
        view.add_(late)
        self._before = None

    def _prepare_to_send(self, factor: float) -> None:
        self._factor = 1.0 if self._sums else factor
        if self._carried:
            self._reducer.carry(self._carried * self._factor if not self._sums else 1.0)
            self._carried = 0
        self._follow_scale()
        self._missing = [len(bucket.members) for bucket in self._layout.plan.buckets]

    def _follow_scale(self) -> None:
        """Bring what codecs keep to the unit of the gradients that are to be sent."""
        if self._layout.lossy:
            self.memory.use_scale(self._scaler.scale())

    def _compare(self) -> None:
        """Make the comparisons that are due: plan and strategy when they are new, the weights before they first count.

        Never in the middle of a backward: the order in which it reaches several optimizers may differ between ranks.
        """
        if not self._agreed:
            self._agreed = True
            plan, step = self._layout.plan, self.stats.steps
            self.consensus.agree(plan, self.strategy, self._sums, step, self._reducer.asks())

    def _take(self, index: int, p: torch.nn.Parameter) -> None:
        """Move one gradient into its bucket."""
        view, grad = self._layout.views[index], p.grad
        if grad is not None and grad is not view:
            if grad.dtype != view.dtype or grad.device != view.device:
                raise StrategyError(
                    f"parameter {self._names[id(p)]!r} is {grad.dtype} on {grad.device} now and was {view.dtype} on "
                    f"{view.device} when its exchange was planned; convert the model before wrapping the optimizer."
                )
            dense = grad.to_dense() if grad.is_sparse else grad
            if self._have[index]:
                view.add_(dense)
            else:
                self._layout.take(index, dense)
        self._have[index] = True

    def _send_full(self) -> None:
        """Send the buckets whose turn it is and that are full; the last one waits for the usage flags."""
        if not (self._agreed and self.consensus.compared):
            return
        while (n := self._reducer.started) < len(self._missing) - 1 and self._missing[n] == 0:
            self._send()

    def _send(self) -> None:
        """Send the next bucket of the plan, scaled to the mean over micro-batches."""
        bucket, factor = self._reducer.started, self._factor
        if self._root_only:  # the other ranks' gradients were taken at other weights
            factor *= self.collectives.size if self.collectives.rank == 0 else 0
        if factor != 1.0:
            self._layout.scale(bucket, factor)
        self._reducer.start(self._layout.send(bucket))

    @torch.no_grad()
    def ending(self) -> None:
        """Close one micro-batch; after the window's last one, send what is left."""
        self._hooks.close()
        self._unfinished = False
        self.window.add()
        self._compare()
        if self._closing:
            self._send_rest()
        else:
            self._scaler.block()

    @torch.no_grad()
    def end(self) -> None:
        """After the window's last micro-batch, wait for its means."""
        if self._closing:
            self._receive()

    def _send_rest(self) -> None:
        self._scaler.unblock()
        self._root_only = self.consensus.weights_differ()
        if self._root_only:
            self.follow(0)
            self._follow_scale()
        if self._layout.plan.buckets:
            self._fill_in()
        while self._reducer.started < len(self._layout.plan.buckets):
            self._send()

    def _receive(self) -> None:
        """Wait for all buckets, and leave the means in ``p.grad``."""
        if not self._layout.plan.buckets:
            return
        self._layout.own()
        for bucket, mean in enumerate(self._reducer.finish()):
            self._layout.receive(bucket, mean)
        if self._root_only:
            self._root_only = False
            self.consensus.copy_from_root()
        else:
            self._read_notes()
        self._hand_out()

    def _fill_in(self) -> None:
        """Let parameters that this rank did not use count as zeros, and note which were used."""
        self._layout.notes.copy_(torch.tensor(self._notes()))
        if all(self._have):
            self._layout.flags.fill_(1.0)
            return
        for index, p in enumerate(self._params):
            if self._layout.bucket_of[index] is None or self._have[index]:
                continue
            if p.grad is None:
                self._layout.clear(index)
            elif p.grad is not self._layout.views[index]:
                self._take(index, p)  # set by hand
        used = [float(have or p.grad is not None) for have, p in zip(self._have, self._params, strict=True)]
        self._layout.flags.copy_(torch.tensor(used))

    def _notes(self) -> list[float]:
        """What travels behind the usage flags: this rank is there; then counts, which must be the others'."""
        assert self._current is not None
        return [1.0, *(float(n % _NOTED) for n in (self._current.number, self.updates, self.loads))]

    def _read_notes(self) -> None:
        """Compare the counts with the mean of all ranks'.

        Raises:
            ExchangeError: a rank trains other parameters, has made another number of updates, or loaded another state.
        """
        size, notes = self.collectives.size, self._layout.notes
        factor = size if self.strategy.op == "sum" else 1
        tolerance = max(0.5 / size, 4 * _NOTED * torch.finfo(notes.dtype).eps)
        present, *means = (note / factor for note in notes.tolist())
        if not present > 1 - 0.5 / size:  # a rank has joined
            return
        kinds = ("", "updates", "loads of optimizer state")
        for mean, mine, kind in zip(means, self._notes()[1:], kinds, strict=True):
            if abs(mean - mine) > tolerance:
                raise ExchangeError(f"rank {self.session.world.rank} {self._parted(mean, mine, kind)}")

    @staticmethod
    def _parted(mean: float, mine: float, kind: str) -> str:
        """Say how this rank's count differs from the others', and what to do."""
        if not kind:
            return (
                "trains other parameters than other ranks do; freeze and thaw the same ones (requires_grad) on all "
                "ranks before the same backward()."
            )
        return (
            f"has made {mine:g} {kind} and the mean over ranks is {mean:g} (modulo {_NOTED}), so some ranks have "
            f"skipped or repeated one; call step(), zero_grad() and load_state_dict() alike on all ranks."
        )

    def _hand_out(self) -> None:
        """Make the means the parameters' gradients; none where no rank used the parameter."""
        sparse = isinstance(self.optimizer, torch.optim.SparseAdam)
        used = None if all(self._have) else self._layout.flags.tolist()
        for index, (p, view) in enumerate(zip(self._params, self._layout.views, strict=True)):
            if self._layout.bucket_of[index] is None:
                continue
            if used is not None and used[index] == 0:
                p.grad = None
            else:
                p.grad = view.to_sparse(1) if sparse else view
        self._have = [False] * len(self._params)

    # -- layout -----------------------------------------------------------------------------------------------

    @property
    def _layout(self) -> Layout:
        assert self._current is not None
        return self._current.layout

    @property
    def _reducer(self) -> Reducer[torch.Tensor]:
        assert self._current is not None
        return self._current.reducer

    @property
    def _sums(self) -> bool:
        """Whether micro-batches are added up rather than averaged."""
        return self._sum_passes or self.strategy.op == "sum"

    def _choose_layout(self) -> None:
        """Lay out the parameters that are trained now; a frozen one that is thawed brings a new layout."""
        flags = tuple([p.requires_grad for p in self._params])
        if self._current is None or flags != self._flags or not self._built:
            self._switch_layout(flags)

    def _switch_layout(self, flags: tuple[bool, ...]) -> None:
        before, self._flags = self._current, flags
        if flags not in self._built:
            self._agreed = False
            self._built[flags] = self._build(flags)
            while len(self._built) > _KEPT_LAYOUTS:
                del self._built[next(iter(self._built))]
        self._current = self._built[flags]
        self.memory.move(self._current.reducer)
        self._have += [False] * (len(self._params) - len(self._have))
        if before is not None and self.window.count:  # a half-filled window comes along
            for index, view in enumerate(before.layout.views):
                if self._have[index] and self._layout.bucket_of[index] is not None:
                    self._layout.take(index, view)

    def _build(self, flags: tuple[bool, ...]) -> _Built:
        trained = [p if flag else _nothing(p) for p, flag in zip(self._params, flags, strict=True)]
        layout = lay_out(list(self.named().values()), trained, self.strategy)
        arrays = TorchArrays(layout.device)
        number, watch = next(self._layouts), self.session.watch
        scope = f"{self.scope}.{number}"
        return _Built(number, layout, Reducer(layout.plan, self.strategy, self._wire, arrays, watch, scope, self.stats))

    def agree_now(self) -> None:
        """Compare with all ranks before anything else is exchanged."""
        self._choose_layout()
        self._compare()

    # -- step and zero_grad -----------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the next ``step()`` updates."""
        return self._alone or self.window.full

    def step(self, base: Callable[[], Any]) -> Any:
        """Update if an update is due, else hold it back; return what ``base`` returned."""
        if self._alone:
            self.updated = True
            self.updates += 1
            self.stats.steps += 1
            return base()
        if self._repeats():
            return base()
        if self._is_behind():
            self._empty_backward()
            self._warn_of_late_gradients()
        self._scaler.refuse(self.window)
        self.updated = self.window.step()
        if not self.updated:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a held step is a step to a scheduler
            return None
        self.flush()
        result = base()
        self.finish_update()
        return result

    def finish_update(self) -> None:
        """Keep the codecs' state, begin a new window, and compare the parameters where that is due."""
        self.updated = True
        if self._current is not None:
            self._reducer.commit()
            self._layout.release()
        self.window.restart()
        self.updates += 1
        self._thrown = 0
        self.memory.updated()
        if self._unverified or (self._check_every and self.updates % self._check_every == 0):
            self._unverified = False
            self.consensus.verify(self.stats.steps, self.updates)

    def synchronize(self) -> None:
        """Take part in the exchange here, where this rank had no backward; nothing otherwise."""
        if not self._alone and not self._repeats() and self._is_behind():
            self._empty_backward()

    def _is_behind(self) -> bool:
        """Whether this rank had no backward since the last step."""
        return self.window.since_step == 0 and not self.window.full

    def _warn_of_late_gradients(self) -> None:
        if not self._warned and self.collectives.size > 1 and any(p.grad is not None for p in self._params):
            self._warned = True
            log.warning(
                "rank %d had no gradient of its own and gets the other ranks' inside step(), too late for clipping; "
                "call optimizer.synchronize() after the place of backward() if you clip.",
                self.session.world.rank,
            )

    def _repeats(self) -> bool:
        """Whether this is a second ``step()`` on gradients that were exchanged already."""
        return not self._zeroed and self.window.count == 0 and self.window.since_step == 0

    @torch.no_grad()
    def _empty_backward(self) -> None:
        """Take part in an exchange for which this rank has no gradients, or some that were set by hand."""
        self._open(carried=False)
        for index, p in enumerate(self._params):
            if not self._closing and p.grad is not None and self._layout.bucket_of[index] is not None:
                self._take(index, p)
                p.grad = None
        self.ending()
        self.end()

    def zero_grad(self) -> None:
        """Note a call of ``zero_grad()``: gradients that no ``step()`` has seen are thrown away."""
        if self.window.since_step > 0 or self._unfinished:
            self._thrown += self.window.since_step
            self.discard()
        self._zeroed = True
        if self._thrown > 2 * self.window.length > 2 and not self._warned:
            self._warned = True
            log.warning(
                "rank %d: zero_grad() has thrown away %d micro-batches since the last update, because no step() came "
                "between; call step() after every backward(), or zero_grad() only after step().",
                self.session.world.rank, self._thrown,
            )  # fmt: skip

    def discard(self) -> None:
        """Throw the current window away; it leaves no trace."""
        self.window.restart()
        self._carried = 0
        self._unfinished = False
        self._have = [False] * len(self._params)
        if self._current is not None:
            self._reducer.rollback()
            self._layout.release()

    # -- state_dict -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what goes into the optimizer's ``state_dict()``; no other rank is asked.

        An exchange whose update has not been made will be made anew, so it is not counted; that of one that a loss
        scaling has skipped will not.
        """
        if self.window.count % self.window.length and not self._warned_of_parts:
            self._warned_of_parts = True
            log.warning(
                "rank %d: state_dict() came after micro-batch %d of accumulate=%d; a half-filled window is not in it.",
                self.session.world.rank, self.window.count, self.window.length,
            )  # fmt: skip
        waits = self.window.full and (self._current is None or self._reducer.finite)
        return self.memory.state_dict(self.stats.steps - waits, self.updates)

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from a ``state_dict()``; from one of a plain optimizer (``None``) with nothing kept."""
        self.loads += 1
        self.discard()
        self._load(saved)

    @torch.no_grad()
    def _load(self, saved: Mapping[str, Any] | None) -> None:
        self.memory.load(saved)
        self._unverified = True
        if saved is not None:
            self.stats.steps, self.updates = saved["exchanges"], saved["updates"]

    def follow(self, root: int) -> None:
        """Where ``root`` alone has loaded a state, load it too; all ranks call this together."""
        counts = self.session.gather(f"{self.loads} {self.updates} {self.stats.steps}".encode(), self.collectives)
        loads, updates, steps = map(int, counts[root].split())
        if all(int(count.split()[0]) == loads for count in counts):
            return
        mine = self.memory.state_dict(steps, updates) if self.collectives.rank == root else None
        saved = object_from(self.session, mine, root, f"{self.scope}.state", self.collectives)
        if self.loads != loads:
            self._load(saved)
            self.loads = loads

    @torch.no_grad()
    def flush(self) -> bool:
        """Close a partial window with the mean over the micro-batches it has on all ranks; all ranks call it.

        Afterwards ``p.grad`` holds that mean and a ``step()`` is due. Returns False, and does nothing, where no rank
        has a micro-batch.
        """
        if self.ready:
            return True
        self._choose_layout()
        self._compare()
        counts = self.session.gather(str(self.window.count).encode(), self.collectives)
        total = sum(int(count) for count in counts)
        if total == 0:
            return False
        if self.window.count == 0:  # what is left in p.grad belongs to the last update
            for p in self._params:
                p.grad = None
        self._prepare_to_send(self.collectives.size / total)
        self._send_rest()
        self._receive()
        self.window.close()
        return True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave gradients alone for a while."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


def _nothing(p: torch.nn.Parameter) -> torch.nn.Parameter:
    """Stand in for a frozen parameter: nothing to exchange."""
    return torch.nn.Parameter(p.detach().new_empty(0, dtype=torch.float32), requires_grad=False)
