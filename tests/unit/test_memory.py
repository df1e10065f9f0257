"""Memory that is lent again and again: what is lent for what, and when it is given up."""

import gc
import os

import pytest

from hvdplus import memory as lending
from hvdplus.memory import Pool

LARGE = 2**20


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    ("size", "again"), [(LARGE, False), (3 * LARGE // 2, True), (3 * LARGE, True), (4 * LARGE, False)]
)
def test_free_memory_serves_what_is_a_little_smaller(size, again):
    pool = Pool()
    array = pool.lend((3 * LARGE,), "uint8")
    place = address(array)
    del array
    gc.collect()
    other = pool.lend((size,), "uint8")
    other[:] = 1
    assert (address(other) == place) == again


def test_the_smallest_that_fits_is_lent(monkeypatch):
    pool = Pool()
    arrays = {size: pool.lend((size * LARGE,), "uint8") for size in (5, 3, 4)}
    places = {size: address(array) for size, array in arrays.items()}
    arrays.clear()
    gc.collect()
    monkeypatch.setattr(lending, "_new_pages", None)
    taken = [pool.lend((3 * LARGE,), "uint8") for _ in range(3)]
    assert [address(array) for array in taken] == [places[3], places[4], places[5]]


def test_a_forked_child_has_memory_of_its_own():
    array = Pool().lend((LARGE,), "uint8")
    array[:] = 1
    child = os.fork()
    if not child:
        array[:] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert set(array.tolist()) == {1}


def test_memory_that_fits_nothing_any_more_is_given_up(monkeypatch):
    monkeypatch.setattr(lending, "_PATIENCE", 5)
    pool = Pool()
    unused = pool.lend((9 * LARGE,), "uint8")
    del unused
    for number in range(8):
        gc.collect()
        assert [len(pages) for _, pages in pool._free] == [9 * LARGE] * (number < 6) + [LARGE] * (number > 0)
        array = pool.lend((LARGE,), "uint8")
        del array
