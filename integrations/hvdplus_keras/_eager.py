"""The exchange of a plan's buckets on the torch backend of Keras: the core's reducer, with its state in variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from hvdplus.arrays import Cell, NumPyArray
from hvdplus.codecs import Codec, Site
from hvdplus.collectives import Collectives
from hvdplus.plan import Bucket, Plan
from hvdplus.reducer import Reducer
from hvdplus.session import Session
from hvdplus.state import in_gradients
from hvdplus.stats import Stats
from hvdplus.strategy import Strategy
from hvdplus_torch._arrays import TorchArrays


class _KerasCell(Cell[torch.Tensor]):
    """A cell in a variable of the optimizer, so that it is saved and loaded with it."""

    def __init__(self, variable: Any, scale: Callable[[], float]) -> None:
        super().__init__(torch.empty(0))
        self._variable, self._scale = variable, scale

    def read(self) -> torch.Tensor:
        """Return the variable's value, in the unit of the gradients that are exchanged."""
        value: torch.Tensor = self._variable.value.detach()
        return value if self._scale() == 1.0 else value * self._scale()

    def commit(self) -> None:
        """Assign what was written, in the unit of true gradients."""
        if self._staged is not None:
            self._variable.assign(self._staged if self._scale() == 1.0 else self._staged / self._scale())
        self.rollback()

    def rollback(self) -> None:
        """Drop what was written; what was read of the variable is its own memory, and no spare one."""
        super().rollback()
        if self.spare is not None and self.spare.data_ptr() == self._variable.value.data_ptr():
            self.spare = None


class EagerExchange:
    """Averages the buckets of a plan over the ranks; arguments as of ``hvdplus_tensorflow._exchange.Exchange``."""

    def __init__(
        self,
        plan: Plan,
        strategy: Strategy,
        session: Session[torch.Tensor],
        collectives: Collectives[torch.Tensor],
        scope: str,
        stats: Stats,
        before: Callable[[], float],
        after: Callable[[NumPyArray], bool],
        new_variable: Callable[[str, int, str], Any],
    ) -> None:
        self._before, self._after = before, after
        self._tail = plan.buckets[-1].flags_offset
        self._scale = 1.0  # of the exchange that runs now

        def cell(name: str, size: int, dtype: str) -> _KerasCell:
            scaled = in_gradients(name)
            return _KerasCell(new_variable(name, size, dtype), lambda: self._scale if scaled else 1.0)

        arrays = TorchArrays(keras.ops.zeros(()).device)  # where Keras puts variables, which torch does not know
        self.reducer = _Resumed(plan, strategy, collectives, arrays, session.watch, scope, stats, cell)
        self.asks = self.reducer.prepare()

    @torch.no_grad()
    def __call__(self, values: list[torch.Tensor], step: Any, scale: Any = None) -> tuple[list[torch.Tensor], bool]:
        """Return the means and what ``after`` returned; ``step`` is the number of exchanges before this one."""
        factor = self._before()
        self.reducer.step, self._scale = int(step), 1.0 if scale is None else float(scale)
        for value in values:
            self.reducer.start(value if factor == 1.0 else value * factor if factor else torch.zeros_like(value))
        means = self.reducer.finish()
        if means[-1][-1] > 0:
            self.reducer.commit()
        else:  # the ranks' weight: nobody had anything to give, and there is no update that would deliver
            self.reducer.rollback()
        self._scale = 1.0
        return means, self._after(means[-1][self._tail :].float().cpu().numpy())

    def joined(self, parts: Sequence[torch.Tensor], bucket: Bucket) -> torch.Tensor:
        """Return the flat values of a bucket's members behind one another."""
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


class _Resumed(Reducer[torch.Tensor]):
    """Counts steps from where the optimizer's own number of exchanges stands, which is saved with it."""

    step = 0

    def _choose(self, bucket: Bucket, site: Site[torch.Tensor]) -> tuple[Codec, bool]:
        counted, self.stats.steps = self.stats.steps, self.step
        chosen = super()._choose(bucket, site)
        self.stats.steps = counted
        return chosen
