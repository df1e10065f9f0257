"""Memory for large arrays that come and go in every step, lent again and again."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdplus.arrays import NumPyArray

_ALIGNMENT = 64  # bytes; TensorFlow copies an array that begins elsewhere
_LARGE = 2**20  # bytes from which an allocator gives memory back to the system, where asking for it anew is slow
_PATIENCE = 1000  # memory that came back before the last so many lendings, and fits none, is given up
_SLACK = 2  # memory so many times as large as needed is lent


class Pool:
    """Lends arrays that are not set, and takes their memory back when nobody refers to them any more.

    Frameworks take an array for a tensor's own memory, and let go of it with the tensor.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, mmap.mmap]] = []  # and when it came back
        self._lent = 0  # how often memory was lent

    def lend(self, shape: Sequence[int], dtype: str) -> NumPyArray:
        """Return an array of this shape and dtype; what is in it is anything."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        memory = self._pages(size) if size >= _LARGE else _aligned(size)
        return np.ndarray(shape, dtype, memory)

    def _pages(self, size: int) -> Any:
        """Return memory that comes back when it and all arrays in it are gone."""
        self._lent += 1
        pages = self._fitting(size) or _new_pages(size)
        memory = (ctypes.c_char * size).from_buffer(pages)
        weakref.finalize(memory, self._take_back, pages).atexit = False
        with contextlib.suppress(IndexError):  # there is none, or another op of a graph took it
            if self._lent - self._free[0][0] > _PATIENCE:
                self._free.pop(0)
        return memory

    def _take_back(self, pages: mmap.mmap) -> None:
        self._free.append((self._lent, pages))

    def _fitting(self, size: int) -> mmap.mmap | None:
        """Take the smallest free memory that is large enough and not much too large: buckets are of many sizes."""
        while fitting := [entry for entry in self._free.copy() if size <= len(entry[1]) <= _SLACK * size]:
            best = min(fitting, key=lambda entry: len(entry[1]))
            with contextlib.suppress(ValueError):  # ops of a graph run side by side: another took it
                self._free.remove(best)
                return best[1]
        return None


def _new_pages(size: int) -> mmap.mmap:
    """Return memory of its own, which a forked child does not share, in large pages where the system has them."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _aligned(size: int) -> NumPyArray:
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size]
