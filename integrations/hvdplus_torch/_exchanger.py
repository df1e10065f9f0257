"""Averages one optimizer's gradients in the course of backward: the hooks, the window, the first step's checks."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.weak import WeakIdKeyDictionary

from hvdplus.agreement import agree, describe
from hvdplus.collectives import AllReduce, Collectives
from hvdplus.errors import ExchangeError, StrategyError
from hvdplus.reducer import Reducer, Window
from hvdplus.stats import Stats
from hvdplus.strategy import Strategy
from hvdplus_torch._arrays import TorchArrays
from hvdplus_torch._broadcast import checksum, optimizer_state_from
from hvdplus_torch._layout import Layout, check_shape, lay_out
from hvdplus_torch._session import Session, broadcast

log = logging.getLogger("hvdplus")

_KEPT_LAYOUTS = 2  # two parts of a model that are frozen in turn need no new buffers each time

# The exchanger that owns a parameter's hook: the newest optimizer that was wrapped around it.
_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()

_LOOP = (
    "call scaler.step(optimizer), scaler.update() and optimizer.zero_grad() only `if optimizer.hvdplus.ready:`, "
    "that is after the window's last backward"
)


@dataclass
class _Built:
    """A layout and the reducer that exchanges it."""

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
        scope: str,
        sum_passes: bool,
    ) -> None:
        self.optimizer = optimizer
        self.strategy, self.session, self.collectives = strategy, session, collectives
        self.scope, self.sum_passes = scope, sum_passes
        self.window = Window(strategy.accumulate)
        self.stats = Stats()
        self.updates = 0
        self.updated = False
        self.check_every = _check_every()
        self._names = names
        self._params: list[torch.nn.Parameter] = []
        self._handles: list[list[Any]] = []
        self._alone = collectives.size == 1 and strategy.accumulate == 1  # the plain optimizer: no hook, no copy
        self._early = strategy.accumulate > 1
        self._agreed = True
        self._factor = 1.0
        self._layouts = itertools.count()
        self._built: dict[tuple[bool, ...], _Built] = {}
        self._current: _Built | None = None
        self._flags: tuple[bool, ...] = ()
        self._have: list[bool] = []
        self._missing: list[int] = []
        self._callback: Callable[[], object] = lambda: None  # returns the running backward's end, None when it is over
        self._closing = False
        self._zeroed = True
        self._paused = False  # set by no_sync()
        self._checked = False
        self._root_only = False
        self._scaling_was: bool | None = None
        self.adopt()

    # -- parameters -------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Take in every parameter of the optimizer that is not known yet."""
        for g, group in enumerate(self.optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if not any(p is known for known in self._params):
                    check_shape(self._names.setdefault(id(p), f"group{g}.param{i}"), p)
                    self._params.append(p)
        self._hook_all()
        self._built.clear()

    def resize(self, length: int) -> None:
        """Give the windows that follow another number of micro-batches; the ranks compare it at the next backward."""
        self.strategy = replace(self.strategy, accumulate=length)
        self.window.resize(length)
        self._agreed = False
        if length > 1 and not self._early:
            self._alone, self._early = False, True
            for handle in itertools.chain(*self._handles):
                handle.remove()
            self._handles.clear()
            self._hook_all()

    def _hook_all(self) -> None:
        if not self._alone:
            for index in range(len(self._handles), len(self._params)):
                self._handles.append(self._hook(self._params[index], index))

    def _hook(self, p: torch.nn.Parameter, index: int) -> list[Any]:
        if not (p.is_floating_point() or p.is_complex()):  # an integer has no gradient
            return []
        owner = _OWNERS.get(p)
        if owner is not None and owner() not in (None, self):
            owner().release(p)
        _OWNERS[p] = weakref.ref(self)
        trained = p.requires_grad
        p.requires_grad_(True)  # torch refuses to hook what is frozen, and it may be thawed later
        handles = [p.register_post_accumulate_grad_hook(partial(_arrived, weakref.ref(self), index))]
        if self._early:  # a window that goes on must scale its mean before autograd adds to it
            handles.append(p.register_hook(partial(_arriving, weakref.ref(self), index)))
        p.requires_grad_(trained)
        return handles

    def release(self, p: torch.nn.Parameter) -> None:
        """Give up a parameter that a newer optimizer has taken over."""
        for known, handles in zip(self._params, self._handles, strict=False):
            if known is p:
                for handle in handles:
                    handle.remove()

    # -- backward ---------------------------------------------------------------------------------------------

    def arrived(self, index: int, p: torch.nn.Parameter) -> None:
        """Take in one parameter's gradient, which autograd has just finished; send its bucket if that is full."""
        if self._paused:
            return
        self.arriving(index)
        if self._layout.bucket_of[index] is None:  # it has no elements
            return
        self._take(index, p)
        if self._closing:
            p.grad = self._view(index)
            self._count_in(index)
        else:
            p.grad = None

    def arriving(self, index: int) -> None:
        """Open a micro-batch at the first sign of a backward pass."""
        if not self._paused and self._callback() is None:
            self._begin(index)

    @torch.no_grad()
    def _begin(self, index: int) -> None:
        """A backward pass shows itself by its first hook; its end is asked of the autograd engine."""
        end = _End(self)
        self._callback = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)
        if self.window.length > 1 and _in_reentrant_checkpoint():
            raise StrategyError(
                f"accumulate={self.window.length} cannot count micro-batches under reentrant activation checkpointing; "
                f"use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        built, grad = self._current, self._params[index].grad
        views = built.layout.views if built else []
        self._open(carried=grad is not None and index < len(views) and grad is views[index])

    def _open(self, carried: bool) -> None:
        """Prepare for one more micro-batch. ``carried``: the last window's mean is still there, to be added to."""
        built = self._current
        if built is not None and built.reducer.started:
            raise ExchangeError(
                f"rank {self.session.world.rank}: the last backward() ended with an error after "
                f"{built.reducer.started} bucket(s) were sent to the other ranks; this job cannot go on, restart it "
                f"from a checkpoint."
            )
        if self.window.full:
            self._reopen(carried)
        self._choose_layout()
        self._closing = self.window.closing
        self._zeroed = False
        if self._closing:
            self._factor = 1.0 if self._sums else 1.0 / (self.window.count + 1)
            self._missing = [len(b.members) for b in self._layout.plan.buckets]
            self._check_once()

    def _reopen(self, carried: bool) -> None:
        """Go on from a full window that had no step: add to it, or drop what was thrown away."""
        if carried and self.window.length > 1:
            # The mean of n becomes their sum again; it is the same on all ranks, so its mean over ranks is itself.
            for buffer in self._layout.buffers:
                buffer.mul_(1.0 if self._sums else self.window.count)
        elif carried:
            self.window.count = 0
            self._reducer.commit()
        else:
            self.discard()

    def _take(self, index: int, p: torch.nn.Parameter) -> None:
        """Move one gradient into its bucket."""
        view, grad = self._view(index), p.grad
        if grad is view or grad is None:
            pass
        elif self._have[index]:
            view.add_(grad.to_dense() if grad.is_sparse else grad)
        else:
            view.copy_(grad.to_dense() if grad.is_sparse else grad)
        self._have[index] = True

    def _count_in(self, index: int) -> None:
        bucket = self._layout.bucket_of[index]
        assert bucket is not None
        self._missing[bucket] -= 1
        while (n := self._reducer.started) < len(self._missing) - 1 and self._missing[n] == 0:
            self._send()

    def _send(self) -> None:
        """Send the next bucket of the plan, scaled to the mean over micro-batches."""
        buffer, factor = self._layout.buffers[self._reducer.started], self._factor
        if self._root_only:  # the other ranks' gradients were taken at other weights
            factor *= self.collectives.size if self.collectives.rank == 0 else 0
        if factor == 0.0:
            buffer.zero_()  # a product would keep a NaN
        elif factor != 1.0:
            buffer.mul_(factor)
        self._reducer.start(buffer)

    @torch.no_grad()
    def end(self) -> None:
        """Close one micro-batch; after the window's last one, wait for all buckets."""
        self._callback = lambda: None
        self.window.add()
        if self._closing:
            self._exchange()
        else:
            self._block_scaler()

    def _exchange(self) -> None:
        """Send what is left, wait for everything, and leave the means in ``p.grad``."""
        if not self._layout.plan.buckets:
            return
        self._fill_in()
        while self._reducer.started < len(self._layout.buffers):
            self._send()
        for buffer, mean in zip(self._layout.buffers, self._reducer.finish(), strict=True):
            if mean.data_ptr() != buffer.data_ptr():
                buffer.copy_(mean)
        if self._root_only:
            self._copy_from_root()
        self._hand_out()
        self._unblock_scaler()

    def _fill_in(self) -> None:
        """Let parameters that this rank did not use count as zeros, and note which were used."""
        for index, p in enumerate(self._params):
            if self._layout.bucket_of[index] is None or self._have[index]:
                continue
            if p.grad is not None and p.grad is not self._view(index):
                self._take(index, p)  # set by hand
            elif p.grad is None:
                self._view(index).zero_()
        used = [float(have or p.grad is not None) for have, p in zip(self._have, self._params, strict=True)]
        self._layout.flags.copy_(torch.tensor(used))

    def _hand_out(self) -> None:
        """Make every gradient a view into its bucket; none where no rank used the parameter."""
        sparse = isinstance(self.optimizer, torch.optim.SparseAdam)
        used = self._layout.flags if not all(self._have) else None
        for index, p in enumerate(self._params):
            if self._layout.bucket_of[index] is None:
                continue
            view = self._view(index)
            if not self._have[index] and used is not None and not float(used[index]):
                p.grad = None
            else:
                p.grad = view.to_sparse(1) if sparse else view
            self._have[index] = False

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
        return self.sum_passes or self.strategy.op == "sum"

    def _view(self, index: int) -> torch.Tensor:
        return self._layout.views[index]

    def _choose_layout(self) -> None:
        """Lay out the parameters that are trained now; a frozen one that is thawed brings a new layout."""
        flags = tuple([p.requires_grad for p in self._params])
        if self._current is not None and flags == self._flags and self._built:
            if not self._agreed:
                self._agree(self._layout)
            return
        before, self._flags = self._current, flags
        if flags not in self._built:
            self._built[flags] = self._build(flags)
            while len(self._built) > _KEPT_LAYOUTS:
                del self._built[next(iter(self._built))]
        self._current = self._built[flags]
        if self.window.count == 0 or before is None:
            self._have = [False] * len(self._params)
        else:
            self._carry_over(before.layout)

    def _build(self, flags: tuple[bool, ...]) -> _Built:
        trained = [p if flag else _nothing(p) for p, flag in zip(self._params, flags, strict=True)]
        layout = lay_out(self._ordered_names(), trained, self.strategy)
        arrays = TorchArrays(layout.buffers[0].device if layout.buffers else "cpu")
        scope = f"{self.scope}.{next(self._layouts)}"
        reducer = Reducer(layout.plan, self.strategy, self.collectives, arrays, self.session.watch, scope, self.stats)
        self._agree(layout)
        return _Built(layout, reducer)

    def named(self) -> dict[torch.nn.Parameter, str]:
        """Return the parameters and their names."""
        return dict(zip(self._params, self._ordered_names(), strict=True))

    def _ordered_names(self) -> list[str]:
        return [self._names[id(p)] for p in self._params]

    def _carry_over(self, before: Layout) -> None:
        """Take a half-filled window along into a new layout."""
        self._have += [False] * (len(self._params) - len(self._have))
        for index, view in enumerate(before.views):
            if self._have[index] and self._layout.bucket_of[index] is not None:
                self._layout.views[index].copy_(view)

    # -- agreement --------------------------------------------------------------------------------------------

    def _gather(self, payload: bytes) -> list[bytes]:
        return self.session.gather(payload, self.collectives)

    def _agree(self, layout: Layout) -> None:
        owner = f"{type(self.optimizer).__name__}, wrapped as number {self.scope}"
        items = describe(layout.plan, self.strategy, owner, self._sums)
        self.session.watch.at(self.stats.steps, f"the agreement of optimizer {self.scope}")
        self._agreed = True
        agree(items, self._gather, "all ranks must build the same model, optimizer and strategy in the same order")

    def agree_now(self) -> None:
        """Compare with all ranks before anything else is exchanged."""
        if self.collectives.size > 1:
            self._choose_layout()

    def _check_once(self) -> None:
        """Before the first exchange: do all ranks have the same weights? If not, this step is rank 0's alone."""
        if self._checked or self.collectives.size == 1:
            return
        self._checked = True
        mine = checksum([list(self._params), self.optimizer.state_dict()])
        if len(set(self._gather(str(mine).encode()))) > 1:
            self._root_only = True
            log.warning(
                "rank %d: parameters or optimizer state differ between ranks at the first step; taking rank 0's, and "
                "its gradient alone for this step. Pass model= to wrap() to start equal.",
                self.session.world.rank,
            )

    def _copy_from_root(self) -> None:
        self._root_only = False
        for index, p in enumerate(self._params):
            broadcast(self.session, p, 0, f"{self.scope}.{index}", self.collectives)
        optimizer_state_from(self.session, self.optimizer, 0, self.collectives)

    def verify(self) -> None:
        """Compare the parameters' checksums across ranks.

        Raises:
            ExchangeError: they differ; it names the first parameter and the ranks.
        """
        if self.collectives.size == 1:
            return
        self.session.watch.at(self.stats.steps, "the comparison of parameters")
        items = [(f"parameter {self._names[id(p)]} with checksum", f"{checksum(p):08x}") for p in self._params]
        agree(items, self._gather, f"their parameters must be equal after update {self.updates}, and are not")
        self.session.watch.at(self.stats.steps, "outside an exchange")

    # -- step and zero_grad -----------------------------------------------------------------------------------

    def step(self, base: Callable[[], Any]) -> Any:
        """Update if an update is due, else hold it back; return what ``base`` returned."""
        if self._alone:
            self.updated = True
            self.stats.steps += 1
            return base()
        if self._repeats():
            return base()
        if self.window.since_step == 0 and not self.window.full:
            self._empty_backward()
        self._refuse_scaler()
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
        self.window.restart()
        self.updates += 1
        if self.updates == 1 or (self.check_every and self.updates % self.check_every == 0):
            self.verify()

    def _repeats(self) -> bool:
        """Whether this is a second ``step()`` on gradients that were exchanged already."""
        return not self._zeroed and self.window.count == 0 and self.window.since_step == 0

    @torch.no_grad()
    def _empty_backward(self) -> None:
        """Take part in an exchange for which this rank has no gradients, or some that were set by hand."""
        self._open(carried=False)
        if not self._closing:
            for index, p in enumerate(self._params):
                if p.grad is not None and self._layout.bucket_of[index] is not None:
                    self._take(index, p)
                    p.grad = None
        self.end()

    def zero_grad(self) -> None:
        """Note a call of ``zero_grad()``: gradients that no ``step()`` has seen are thrown away."""
        if self.window.since_step > 0:
            self.discard()
        self._zeroed = True

    def discard(self) -> None:
        """Throw the current window away; it leaves no trace."""
        self.window.restart()
        self._have = [False] * len(self._params)
        if self._current is not None:
            self._reducer.rollback()

    @torch.no_grad()
    def flush(self) -> bool:
        """Close a partial window with the mean over the micro-batches it has on all ranks; all ranks call it.

        Afterwards ``p.grad`` holds that mean and a ``step()`` is due. Returns False, and does nothing, where no rank
        has a micro-batch.
        """
        if self.ready:
            return True
        self._choose_layout()
        total = sum(int(count) for count in self._gather(str(self.window.count).encode()))
        if total == 0:
            return False
        self._factor = 1.0 if self._sums else self.collectives.size / total
        self._check_once()
        self._exchange()
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

    def mean(self, value: Any) -> Any:
        """Return the mean over ranks of one number or 0-d tensor."""
        if self.collectives.size == 1:
            return value
        plain = value.detach() if isinstance(value, torch.Tensor) else value
        number = torch.tensor([float(plain)], dtype=torch.float64)
        request = AllReduce(number, scale=1.0 / self.collectives.size)
        pending = self.collectives.start(request, f"hvdplus.{self.scope}.mean")
        answer = float(self.session.watch.wait(pending)[0])
        return plain.new_tensor(answer) if isinstance(plain, torch.Tensor) else answer

    @property
    def ready(self) -> bool:
        """Whether the next ``step()`` updates."""
        return self._alone or self.window.full

    # -- loss scaling -----------------------------------------------------------------------------------------

    def _block_scaler(self) -> None:
        """Have GradScaler hand its step to the optimizer while a window is half full, so that it can be refused."""
        if self._scaling_was is None:
            self._scaling_was = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def _unblock_scaler(self) -> None:
        if self._scaling_was is not None:
            self.optimizer._step_supports_amp_scaling = self._scaling_was  # type: ignore[attr-defined]
            self._scaling_was = None

    def _refuse_scaler(self) -> None:
        """Refuse a GradScaler's step in a half-filled window: its scale may change before the window is full."""
        marks = [name for name in ("found_inf", "grad_scale") if name in self.optimizer.__dict__]
        if self.window.full or not marks:
            return
        for name in marks:
            delattr(self.optimizer, name)
        raise StrategyError(
            f"GradScaler stepped after micro-batch {self.window.count} of accumulate={self.window.length}, and a loss "
            f"scale must not change inside a window; {_LOOP} (a trailing partial window: optimizer.hvdplus.flush() "
            f"first)."
        )


class _End:
    """The end of one backward pass; autograd alone keeps it alive, so a backward that failed is noticed."""

    def __init__(self, exchanger: Exchanger) -> None:
        self._exchanger = exchanger

    def __call__(self) -> None:
        self._exchanger.end()


def _arrived(exchanger: weakref.ref[Exchanger], index: int, p: torch.nn.Parameter) -> None:
    alive = exchanger()
    if alive is None:
        return
    if torch.is_grad_enabled():  # backward(create_graph=True); entering no_grad each time would cost a microsecond
        with torch.no_grad():
            alive.arrived(index, p)
    else:
        alive.arrived(index, p)


def _arriving(exchanger: weakref.ref[Exchanger], index: int, grad: torch.Tensor) -> None:
    alive = exchanger()
    if alive is not None:
        alive.arriving(index)


def _nothing(p: torch.nn.Parameter) -> torch.nn.Parameter:
    """Stand in for a frozen parameter: nothing to exchange."""
    return torch.nn.Parameter(p.detach().new_empty(0, dtype=torch.float32), requires_grad=False)


def _check_every() -> int:
    text = os.environ.get("HVDPLUS_CHECK_EVERY", "0")
    if not text.isdecimal():
        raise StrategyError(f"HVDPLUS_CHECK_EVERY={text!r} must be a number of updates, 0 for never.")
    return int(text)


def _in_reentrant_checkpoint() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("checkpoint.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
