"""Memory that is lent to TensorFlow: whose it is when, and that nothing is copied."""

import gc

import numpy as np
import pytest
import tensorflow as tf

from hvdplus import memory as lending
from hvdplus.arrays import Output
from hvdplus.memory import Pool
from hvdplus_tensorflow._arrays import TensorFlowArrays

LARGE = 2**20


def address(array):
    return np.asarray(array).__array_interface__["data"][0]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5), (3, LARGE)])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64"])
def test_lent_arrays_begin_where_tensorflow_wants_them(shape, dtype):
    array = Pool().lend(shape, dtype)
    assert (array.shape, array.dtype) == (shape, dtype)
    assert not array.size or address(array) % 64 == 0
    array[...] = 7
    assert (array == 7).all()


@pytest.fixture
def mapped(monkeypatch):
    """The sizes of what the system was asked for."""
    sizes, new_pages = [], lending._new_pages
    monkeypatch.setattr(lending, "_new_pages", lambda size: (sizes.append(size), new_pages(size))[1])
    return sizes


def test_memory_comes_back_when_nobody_refers_to_it(mapped):
    memory = Pool()
    first = memory.lend((LARGE,), "uint8")
    place, part = address(first), first[5:].reshape(-1)
    del first
    gc.collect()
    second = memory.lend((LARGE,), "uint8")
    assert address(second) != place, "a part of it is still in use"
    del part
    gc.collect()
    third = memory.lend((LARGE // 4,), "float32")
    assert address(third) == place
    assert mapped == [LARGE, LARGE]


def test_two_at_a_time_never_share_memory():
    memory = Pool()
    arrays = [memory.lend((LARGE,), "uint8") for _ in range(3)]
    for number, array in enumerate(arrays):
        array[:] = number
    assert [set(array[:: LARGE // 8].tolist()) for array in arrays] == [{0}, {1}, {2}]


def test_what_a_host_function_writes_is_the_tensor(mapped):
    arrays, written = TensorFlowArrays(), []

    def write(x, out):
        written.append(address(out))
        out[:] = x + 1

    double = tf.function(lambda x: arrays.on_host(write, [x], [Output((LARGE,))])[0])
    kept = [double(tf.fill([LARGE], float(number))) for number in range(4)]
    assert [address(memoryview(tensor)) for tensor in kept] == written
    assert [(float(tensor[0]), float(tensor[-1])) for tensor in kept] == [(n + 1.0, n + 1.0) for n in range(4)]
    del kept
    for number in range(6):  # TensorFlow lets go of a tensor's memory at one of the next calls
        double(tf.fill([LARGE], float(number)))
    assert len(mapped) < len(written) == 10


@pytest.mark.parametrize("graph", [False, True])
def test_parts_are_strung_in_order(graph):
    arrays = TensorFlowArrays()
    parts = [tf.range(n, dtype=tf.float32) + 10 * n for n in (3, 0, 1, 5)]
    strung = tf.function(arrays.strung) if graph else arrays.strung
    assert np.array_equal(strung(parts, 9), tf.concat(parts, 0))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("special", [None, np.inf, np.nan])
def test_a_norm_in_a_graph_is_that_of_the_reference(dtype, special):
    values = np.random.default_rng(0).normal(size=100_001).astype(dtype) * 1e25
    if special is not None:
        values[777] = special
    norm = tf.function(TensorFlowArrays().norm)(tf.constant(values))
    assert norm.dtype == tf.float64
    assert np.allclose(norm, np.linalg.norm(values.astype(np.float64)), rtol=1e-12, equal_nan=True)
