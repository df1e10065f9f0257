"""What the codecs of one Keras optimizer keep on this rank, by parameter: in a saved model, and out of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdplus import state
from hvdplus.arrays import NumPyArray, NumPyArrays
from hvdplus.collectives import Collectives
from hvdplus.plan import Plan
from hvdplus.reducer import Reducer
from hvdplus.session import Session
from hvdplus.state import RESIDUAL, Kept, Piece, Saved

log = logging.getLogger("hvdplus")

_ARRAYS = NumPyArrays()
_OWN = "hvdplus."  # what is ours in a store of variables begins with this
_ORIGIN, _EXCHANGES = f"{_OWN}origin", f"{_OWN}exchanges"


class Memory:
    """What codecs keep for an optimizer's variables.

    It lies in variables of the optimizer, in the unit of true gradients, one a bucket; here it is by variable and in
    NumPy arrays. ``origin`` is a variable of three numbers: the rank that holds it, of how many, and the number of
    exchanges at which all ranks held the same (their mean), which is -1 if they never did.

    Args:
        plan: its buckets.
        reducer: its cells.
        exchanges: the variable that counts exchanges.
        windows: the variables of a half-filled window.
        add_variable: makes one (shape, initial value, dtype, name).
        session: reaches the other ranks.
        collectives: those that exchange.
    """

    def __init__(
        self,
        plan: Plan,
        reducer: Reducer[Any],
        exchanges: Any,
        windows: Sequence[Any],
        add_variable: Callable[[tuple[int, ...], Any, str, str], Any],
        session: Session[Any],
        collectives: Collectives[Any],
    ) -> None:
        self._reducer, self._exchanges, self._windows = reducer, exchanges, list(windows)
        self._session, self._collectives = session, collectives
        self._shapes = {p.name: p.shape for p in plan.parameters}
        self._counts = {p.name: p.count for p in plan.parameters}
        self._names = [p.name for p in plan.parameters]
        self._origin = add_variable((3,), self._own_origin, "int64", "origin")

    def _own_origin(self, shape: Any = None, dtype: Any = None) -> Any:
        return keras.ops.convert_to_tensor([self._collectives.rank, self._collectives.size, -1], dtype="int64")

    # -- by variable ------------------------------------------------------------------------------------------

    def kept(self) -> Kept[NumPyArray]:
        """Return a copy of all that is kept."""
        kept = self._reducer.kept()
        return {key: {n: Piece(p.begin, _numpy(p.values)) for n, p in pieces.items()} for key, pieces in kept.items()}

    def keep(self, kept: Kept[NumPyArray]) -> None:
        """Overwrite all that is kept."""
        tensor = keras.ops.convert_to_tensor
        _, misfits = self._reducer.keep(
            {key: {n: Piece(p.begin, tensor(p.values)) for n, p in pieces.items()} for key, pieces in kept.items()}
        )
        if misfits and self._collectives.rank == 0:
            log.warning(state.misfit_line(misfits))

    def residuals(self) -> dict[str, NumPyArray]:
        """Return a copy of the residuals, by variable and in its shape."""
        return {name: p.values.reshape(self._shapes[name]) for name, p in self.kept().get(RESIDUAL, {}).items()}

    def norm(self) -> float:
        """Return their Euclidean norm."""
        return state.norm(self.kept(), _ARRAYS)

    def clear(self) -> None:
        """Forget what was not delivered; PowerSGD's vectors stay."""
        self.keep({key: pieces for key, pieces in self.kept().items() if key not in state.IN_GRADIENTS})

    def consolidate(self) -> None:
        """Let every rank hold the mean over ranks of what they have not delivered; all ranks call it together."""
        kept, group = self.kept(), self._collectives
        whole = state.owed([kept], group.size, self._counts, _ARRAYS)
        mean = {name: Piece(0, self._session.mean(whole[name].values, group)) for name in self._names if name in whole}
        rest = {key: pieces for key, pieces in kept.items() if key not in state.IN_GRADIENTS}
        self.keep({**rest, RESIDUAL: mean})
        self._sign(consolidated=True)

    def _sign(self, consolidated: bool) -> None:
        at = int(self._exchanges) if consolidated else -1
        self._origin.assign([self._collectives.rank, self._collectives.size, at])

    # -- a saved model ----------------------------------------------------------------------------------------

    def saved(self) -> dict[str, NumPyArray]:
        """Return what is to stand in a store of variables, by name; variables go by their number."""
        variables = {_ORIGIN: self._origin, _EXCHANGES: self._exchanges}
        variables |= {f"{_OWN}{variable.name}": variable for variable in self._windows}
        found = {key: keras.ops.convert_to_numpy(variable) for key, variable in variables.items()}
        number = {name: str(index) for index, name in enumerate(self._names)}
        for key, pieces in self.kept().items():
            for name, piece in pieces.items():
                place = "+".join(number[part] for part in state.parameters_of(name))
                found[f"{_OWN}{key}.{piece.begin}.{place}"] = piece.values
        return found

    def load(self, store: Mapping[str, Any]) -> None:
        """Take what ``saved`` has returned, on this rank or another; from a plain optimizer's store, nothing."""
        own = {key: np.asarray(store[key]) for key in store if key.startswith(_OWN)}
        if _ORIGIN not in own:
            self.keep({})
            return
        self._exchanges.assign(own.pop(_EXCHANGES))
        origin = own.pop(_ORIGIN)
        for variable in self._windows:
            value = own.pop(f"{_OWN}{variable.name}", np.zeros(0))
            fits = value.shape == tuple(variable.shape)
            variable.assign(value if fits else keras.ops.zeros(variable.shape, variable.dtype))
        kept: Kept[NumPyArray] = {}
        for label, values in own.items():
            if label.count(".") >= 3:
                key, begin, place = label.removeprefix(_OWN).rsplit(".", 2)
                name = state.whole_name([self._names[int(number)] for number in place.split("+")])
                kept.setdefault(key, {})[name] = Piece(int(begin), values)
        self._go_on(kept, origin)

    def settle(self) -> None:
        """Do the same where the values of all variables were taken as they stood, ``origin`` among them."""
        origin = keras.ops.convert_to_numpy(self._origin)
        if list(origin[:2]) != [self._collectives.rank, self._collectives.size]:
            self._go_on(self.kept(), origin)

    def _go_on(self, kept: Kept[NumPyArray], origin: NumPyArray) -> None:
        """Take this rank's share."""
        rank, before, at = map(int, origin)
        now, alike = self._collectives.size, at == int(self._exchanges)
        ranks = dict.fromkeys(range(before), kept) if alike else {rank: kept}
        mine, line = state.share(Saved(before, ranks), self._collectives.rank, now, self._counts, _ARRAYS)
        if line:
            log.warning(line)
        self.keep(mine)
        self._sign(consolidated=alike and before == now)


def _numpy(values: Any) -> NumPyArray:
    """Return a copy in fp32 or wider."""
    wide = "float64" if keras.backend.standardize_dtype(values.dtype) == "float64" else "float32"
    found: NumPyArray = np.array(keras.ops.convert_to_numpy(keras.ops.cast(values, wide)))
    return found
