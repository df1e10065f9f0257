"""What one optimizer's codecs keep on this rank, by parameter: in ``state_dict()``, out of it, and across layouts."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from hvdplus import state
from hvdplus.collectives import Collectives
from hvdplus.errors import StrategyError
from hvdplus.reducer import Reducer
from hvdplus.state import RESIDUAL, Kept, Piece, Saved
from hvdplus_torch._arrays import TorchArrays
from hvdplus_torch._layout import numbers, shaped, strides
from hvdplus_torch._session import Session

log = logging.getLogger("hvdplus")

KEY = "hvdplus"  # under which it stands in a state_dict
_FORMAT = 1
_SLICE = 2**28  # bytes of a gather: MPI and Horovod count them in 32 bits

Tensor = torch.Tensor
Written = dict[str, dict[str, Any]]  # what is kept, as it stands in a state_dict


class Memory:
    """What codecs keep for an optimizer's parameters, whichever layout they are in.

    The cells of the current layout hold it, in the unit of the gradients that were exchanged last; ``waiting`` is what
    has no place there, in that of true gradients. ``parameters`` are the optimizer's, by name; they may become more.
    """

    def __init__(
        self, session: Session, collectives: Collectives[Tensor], parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self._session, self._collectives, self._parameters = session, collectives, parameters
        self._arrays = TorchArrays()
        self._reducer: Reducer[Tensor] | None = None
        self._waiting: Kept[Tensor] = {}
        self._unit = 1.0  # by how much a loss scaling has multiplied what the cells hold
        self._everyone: Mapping[int, Written] = {}  # all ranks', until the next update

    # -- along the way ----------------------------------------------------------------------------------------

    def kept(self) -> Kept[Tensor]:
        """Return a copy of all that is kept, in the unit of true gradients."""
        now = self._reducer.kept() if self._reducer else {}
        return state.joined(self._waiting, state.rescaled(now, 1.0 / self._unit, self._arrays))

    def keep(self, kept: Kept[Tensor]) -> None:
        """Overwrite all that is kept, in the unit of true gradients."""
        self._everyone, self._unit, self._waiting = {}, 1.0, kept
        if self._reducer is not None:
            self._waiting, misfits = self._reducer.keep(kept)
            self._report(misfits)

    def move(self, reducer: Reducer[Tensor]) -> None:
        """Go on in another layout."""
        if reducer is not self._reducer:
            kept, everyone, self._reducer = self.kept(), self._everyone, reducer
            self.keep(kept)
            self._everyone = everyone

    def use_scale(self, scale: float) -> None:
        """Bring what the cells hold to the unit of gradients that are multiplied by ``scale``."""
        if scale != self._unit and self._reducer is not None:
            self._reducer.keep(state.rescaled(self._reducer.kept(), scale / self._unit, self._arrays))
            self._unit = scale

    def updated(self) -> None:
        """Note that the parameters are new: what other ranks kept is out of date."""
        self._everyone = {}

    def clear(self) -> None:
        """Forget what was not delivered; PowerSGD's vectors stay."""
        self.keep({key: pieces for key, pieces in self.kept().items() if key not in state.IN_GRADIENTS})

    def _report(self, misfits: list[str]) -> None:
        if misfits and self._collectives.rank == 0:
            log.warning(state.misfit_line(misfits))

    # -- what users ask for -----------------------------------------------------------------------------------

    def residuals(self) -> dict[str, Tensor]:
        """Return a copy of the residuals, by parameter and in its shape."""
        pieces = self.kept().get(RESIDUAL, {})
        return {name: shaped(piece.values, self._parameters[name]).clone() for name, piece in pieces.items()}

    def norm(self) -> float:
        """Return their Euclidean norm."""
        return state.norm(self.kept(), self._arrays)

    def consolidate(self) -> None:
        """Fetch what all ranks keep; all ranks call it together."""
        rows = self._gathered(pickle.dumps(self._written(self.kept())))
        self._everyone = {rank: pickle.loads(row) for rank, row in enumerate(rows)}

    def _gathered(self, payload: bytes) -> list[bytes]:
        gather, group = self._session.gather, self._collectives
        longest = max(int(length) for length in gather(str(len(payload)).encode(), group))
        parts = [gather(payload[begin : begin + _SLICE], group) for begin in range(0, longest, _SLICE)]
        return [b"".join(row) for row in zip(*parts, strict=True)]

    # -- state_dict -------------------------------------------------------------------------------------------

    def state_dict(self, exchanges: int, updates: int) -> dict[str, Any]:
        """Return all that a resumed run needs: plain values and copied tensors on the host."""
        rank = self._collectives.rank
        everyone = copy.deepcopy({r: written for r, written in self._everyone.items() if r != rank})
        return {
            "format": _FORMAT,
            "rank": rank,
            "size": self._collectives.size,
            "exchanges": exchanges,
            "updates": updates,
            "ranks": dict(sorted({**everyone, rank: self._written(self.kept())}.items())),
        }

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Take what ``state_dict`` has returned, on this rank or another; ``None`` clears all that is kept."""
        ranks: Mapping[int, Written] = saved["ranks"] if saved else {}
        size, rank = self._collectives.size, self._collectives.rank
        misfits: list[str] = []
        read = {r: self._read(written, misfits) for r, written in ranks.items()}
        counts = {name: numbers(p) for name, p in self._parameters.items()}
        kept, line = state.share(Saved(saved["size"] if saved else size, read), rank, size, counts, self._arrays)
        if line:
            log.warning(line)
        if size == 1:  # one rank is the plain optimizer
            kept = {}
        else:
            self._report(sorted(set(misfits)))
        self.keep(self._on_devices(kept))
        if saved and saved["size"] == size and len(ranks) == size:
            self._everyone = ranks

    def _written(self, kept: Kept[Tensor]) -> Written:
        return {key: {n: self._entry(key, n, piece) for n, piece in pieces.items()} for key, pieces in kept.items()}

    def _entry(self, key: str, name: str, piece: Piece[Tensor]) -> Any:
        """Return a residual in its parameter's shape; else the numbers, and how the parameter lay in memory."""
        p = self._parameters.get(name)
        if key == RESIDUAL and p is not None:
            return shaped(piece.values, p).to("cpu", copy=True)
        values = piece.values.to("cpu", copy=True)
        return {"begin": piece.begin, "values": values, "layout": [] if p is None else list(strides(p))}

    def _read(self, written: Written, misfits: list[str]) -> Kept[Tensor]:
        """Turn a state_dict's entries into numbers; ``misfits`` gets the names of those without a place."""
        kept: Kept[Tensor] = {}
        for key, entries in written.items():
            for name, entry in entries.items():
                piece = self._piece(name, entry)
                if piece is None:
                    misfits.append(f"{name} ({key})")
                else:
                    kept.setdefault(key, {})[name] = piece
        return kept

    def _piece(self, name: str, entry: Any) -> Piece[Tensor] | None:
        p = self._parameters.get(name)
        if not isinstance(entry, Tensor):
            known = all(part in self._parameters for part in state.parameters_of(name))
            alike = p is None or entry["layout"] == list(strides(p))
            return Piece(entry["begin"], entry["values"]) if known and alike else None
        if p is None or entry.shape != p.shape:
            return None
        flat = torch.zeros(numbers(p), dtype=entry.dtype.to_real())
        shaped(flat, p).copy_(entry)
        return Piece(0, flat)

    def _on_devices(self, kept: Kept[Tensor]) -> Kept[Tensor]:
        def moved(name: str, piece: Piece[Tensor]) -> Piece[Tensor]:
            device = self._parameters[state.parameters_of(name)[0]].device
            return Piece(piece.begin, piece.values.to(device, copy=True))

        return {key: {name: moved(name, piece) for name, piece in pieces.items()} for key, pieces in kept.items()}


def check(saved: Mapping[str, Any] | None) -> None:
    """Refuse what this version cannot read.

    Raises:
        StrategyError: it was saved in another format.
    """
    if saved is not None and saved.get("format") != _FORMAT:
        raise StrategyError(
            f"state_dict[{KEY!r}] has format {saved.get('format')!r}, and this version of hvdplus reads {_FORMAT}; "
            f"load it with the version that saved it, or delete that key to start with zero residuals."
        )
