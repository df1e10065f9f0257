"""Tests of the one-rank engine, of the bytes that are counted, and of state cells."""

from __future__ import annotations

import numpy as np
import pytest

from hvdplus.arrays import Cell, NumPyArrays
from hvdplus.codecs import Site
from hvdplus.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    LocalCollectives,
    Ready,
    ReduceScatter,
    wire_bytes,
)

VALUE = np.array([1.0, 2.0], np.float32)


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (AllReduce(VALUE), [1, 2]),
        (AllReduce(VALUE, 0.5), [0.5, 1]),
        (AllGather(VALUE), [[1, 2]]),
        (AllToAll(VALUE[None]), [[1, 2]]),
        (ReduceScatter(VALUE[None]), [1, 2]),
        (ReduceScatter(VALUE[None], 0.5), [0.5, 1]),
        (Broadcast(VALUE), [1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_rank_gets_what_it_gave(request_, answer):
    local = LocalCollectives()
    pending = local.start(request_, "name")
    assert pending.done()
    result = pending.result()
    assert result.dtype == np.float32
    assert result.shape == np.shape(answer)
    assert result.tolist() == answer
    assert (local.rank, local.size) == (0, 1)
    assert local.sums(VALUE, "bfloat16")


def test_ready_is_ready():
    assert Ready(3).done()
    assert Ready(3).result() == 3


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_wire_bytes(size):
    vector, rows = np.zeros(840, np.float32), np.zeros((size, 840 // size), np.float32)
    nbytes = vector.nbytes
    share = nbytes // size
    assert wire_bytes(AllReduce(vector), nbytes, size) == 2 * (size - 1) * share
    assert wire_bytes(ReduceScatter(rows), nbytes, size) == (size - 1) * share
    assert wire_bytes(AllToAll(rows), nbytes, size) == (size - 1) * share
    assert wire_bytes(AllGather(vector), nbytes, size) == (size - 1) * nbytes
    halves = wire_bytes(ReduceScatter(rows), nbytes, size) + wire_bytes(AllGather(rows[0]), share, size)
    assert halves == wire_bytes(AllReduce(vector), nbytes, size)


@pytest.mark.parametrize("kind", [AllReduce, AllGather, AllToAll, ReduceScatter, Broadcast])
def test_one_rank_sends_nothing(kind):
    assert wire_bytes(kind(VALUE[None]), VALUE.nbytes, 1) == 0


def test_a_cell_keeps_what_is_committed():
    cell = Cell(1)
    cell.write(2)
    assert cell.read() == 1
    cell.rollback()
    cell.commit()
    assert cell.read() == 1
    cell.write(2)
    cell.write(3)
    cell.commit()
    assert cell.read() == 3
    cell.rollback()
    assert cell.read() == 3


def test_a_site_makes_a_cell_once_and_of_zeros():
    site = Site("here", NumPyArrays(), LocalCollectives())
    cell = site.cell("residual", 3, "float64")
    assert cell is site.cell("residual", 3, "float64")
    assert cell.read().dtype == np.float64
    assert cell.read().tolist() == [0, 0, 0]
    assert (site.rank, site.size) == (0, 1)
    cell.write(np.ones(3))
    site.rollback()
    site.commit()
    assert cell.read().tolist() == [0, 0, 0]
    cell.write(np.ones(3))
    site.commit()
    assert cell.read().tolist() == [1, 1, 1]
