"""Random bits that are the same on every rank, in every framework and in every version of NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


def hashed(size: int, *key: int) -> npt.NDArray[np.uint64]:
    """Return ``size`` words of 64 random bits that follow from ``key`` (splitmix64: Steele, Lea & Flood 2014).

    Example:
        >>> hashed(3, 0).tolist()[0] == 0xE220A8397B1DCDAF
        True
    """
    state = np.uint64(_seed(key))
    with np.errstate(over="ignore"):
        return _mixed(state + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN))


def _seed(key: tuple[int, ...]) -> int:
    """Fold the numbers of a key into one word, so that neighbouring keys are far apart; a single 0 is itself."""
    seed = 0
    for number in key:
        seed = int(_mixed(np.array([(seed + number * _GOLDEN) & _WORD], np.uint64))[0])
    return seed


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
