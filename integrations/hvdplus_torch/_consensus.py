"""What one optimizer's ranks compare: the plan before the first exchange, the weights before and after it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hvdplus.agreement import agree, describe
from hvdplus.collectives import AllReduce, Collectives
from hvdplus.plan import Plan
from hvdplus.strategy import Strategy
from hvdplus_torch._broadcast import checksum, optimizer_state_from, plain_state
from hvdplus_torch._session import Session, broadcast

log = logging.getLogger("hvdplus")


class Consensus:
    """The comparisons of one wrapped optimizer; all ranks make them together."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: list[torch.nn.Parameter],
        names: dict[int, str],
        session: Session,
        collectives: Collectives[torch.Tensor],
        scope: str,
    ) -> None:
        self._optimizer, self._params, self._names = optimizer, params, names
        self._session, self._collectives, self._scope = session, collectives, scope
        self._alone = collectives.size == 1
        self.compared = self._alone  # the weights were compared

    def _gather(self, payload: bytes) -> list[bytes]:
        return self._session.gather(payload, self._collectives)

    def agree(self, plan: Plan, strategy: Strategy, sums: bool, step: int, asks: list[str]) -> None:
        """Compare plan and strategy, and what codecs of users ask for.

        Raises:
            ExchangeError: they differ; it names the first difference and the ranks.
        """
        owner = f"{type(self._optimizer).__name__}, wrapped as number {self._scope}"
        self._session.watch.at(step, f"the agreement of optimizer {self._scope}")
        hint = "all ranks must build the same model, optimizer and strategy in the same order"
        agree(describe(plan, strategy, owner, sums, asks), self._gather, hint)

    def weights_differ(self) -> bool:
        """Compare parameters and optimizer state, the first time it is asked; False ever after."""
        if self.compared:
            return False
        self.compared = True
        mine = checksum([self._params, plain_state(self._optimizer)])
        if len(set(self._gather(str(mine).encode()))) == 1:
            return False
        log.warning(
            "rank %d: parameters or optimizer state differ between ranks at the first step; taking rank 0's, and its "
            "gradient alone for this step. Pass model= to wrap() to start equal.",
            self._session.world.rank,
        )
        return True

    def copy_from_root(self) -> None:
        """Take rank 0's parameters and optimizer state."""
        for index, p in enumerate(self._params):
            broadcast(self._session, p, 0, f"{self._scope}.{index}", self._collectives)
        optimizer_state_from(self._session, self._optimizer, 0, self._collectives)

    def verify(self, step: int, update: int) -> None:
        """Compare the parameters' checksums.

        Raises:
            ExchangeError: they differ; it names the first parameter and the ranks.
        """
        if self._alone:
            return
        self._session.watch.at(step, "the comparison of parameters")
        items = [(f"parameter {self._names[id(p)]} with checksum", f"{checksum(p):08x}") for p in self._params]
        agree(items, self._gather, f"their parameters must be equal after update {update}, and are not")
        self._session.watch.at(step, "outside an exchange")

    def mean(self, value: Any) -> Any:
        """Return the mean over ranks of one number or 0-d tensor."""
        if self._alone:
            return value
        plain = value.detach() if isinstance(value, torch.Tensor) else value
        request = AllReduce(torch.tensor([float(plain)], dtype=torch.float64), scale=1.0 / self._collectives.size)
        pending = self._collectives.start(request, f"hvdplus.{self._scope}.mean")
        answer = float(self._session.watch.wait(pending)[0])
        return plain.new_tensor(answer) if isinstance(plain, torch.Tensor) else answer
