"""The TensorFlow adapter on one rank, and its array operations against the NumPy reference."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import hvdplus
import hvdplus.tensorflow as hvd
from hvdplus.arrays import NumPyArrays
from hvdplus.world import World
from hvdplus_tensorflow._arrays import TensorFlowArrays

RNG = np.random.default_rng(0)
VALUES = np.concatenate([RNG.normal(size=4001) * 10.0 ** RNG.integers(-9, 6, 4001), [0, 65504, 65520, 1e30, np.inf]])


@pytest.fixture(autouse=True)
def initialised():
    hvd.init()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("graph", [False, True])
def test_bits_are_those_of_the_reference(dtype, graph):
    reference, arrays = NumPyArrays(), TensorFlowArrays()
    x = VALUES.astype("f")
    convert = tf.function(arrays.to_bits) if graph else arrays.to_bits
    bits = convert(tf.constant(x), dtype)
    assert np.array_equal(bits.numpy(), reference.to_bits(x, dtype))
    back = arrays.from_bits(bits, dtype, "float32").numpy()
    assert np.array_equal(back, reference.from_bits(bits.numpy(), dtype, "float32"))


def test_operations_are_those_of_the_reference():
    reference, arrays = NumPyArrays(), TensorFlowArrays()
    x, y = RNG.normal(size=(2, 13)).astype("f")
    tx, ty = tf.constant(x), tf.constant(y)
    assert np.array_equal(arrays.scaled(tx, 1 / 3), reference.scaled(x, 1 / 3))
    assert np.array_equal(arrays.subtract(tx, ty), reference.subtract(x, y))
    assert np.array_equal(arrays.rows(tx, 4), reference.rows(x, 4))
    assert np.array_equal(arrays.mean_rows(arrays.rows(tx, 2)), reference.mean_rows(reference.rows(x, 2)))
    assert (arrays.count(tx), arrays.nbytes(tx), arrays.dtype(tx)) == (13, 52, "float32")
    broken = tf.constant([1.0, np.nan])
    assert not arrays.all_finite(broken)
    assert np.array_equal(arrays.where_finite(broken, tx, ty), y)
    assert float(arrays.norm(tx)) == pytest.approx(reference.norm(x))


def test_a_tape_with_a_strategy():
    variable = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable**2)
    tape = hvd.DistributedGradientTape(tape, strategy="fp16")
    assert np.array_equal(tape.gradient(loss, variable), [2.0, 4.0])


def test_a_tape_refuses_what_it_cannot_do():
    with pytest.raises(hvdplus.StrategyError, match="a tape cannot accumulate=2"):
        hvd.DistributedGradientTape(tf.GradientTape(), strategy="exact,accumulate=2")
    with pytest.raises(hvdplus.StrategyError, match="Horovod's arguments"):
        hvd.DistributedGradientTape(tf.GradientTape(), "/cpu:0", strategy="exact")


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match=r"hvdplus\.tensorflow' has no attribute 'nonsense'"):
        hvd.nonsense  # noqa: B018


def test_devices_can_be_chosen_after_init():
    """A program asks for its local rank and then chooses a device; init() must not have used TensorFlow by then."""
    program = (
        "import tensorflow as tf, hvdplus.tensorflow as hvd\n"
        "hvd.init(); hvd.local_rank()\n"
        "tf.config.set_visible_devices([], 'GPU'); tf.config.threading.set_inter_op_parallelism_threads(1)\n"
        "print('chosen')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "chosen" in done.stdout, done.stderr[-2000:]


def test_a_local_rank_given_by_hand_goes_before_horovods(monkeypatch):
    here = SimpleNamespace(engine="horovod", world=World(0, 4, 2, None, "openmpi"))
    monkeypatch.setattr("hvdplus_tensorflow._session.session", lambda: here)
    monkeypatch.setattr("hvdplus_tensorflow._session.horovod", lambda: SimpleNamespace(local_rank=lambda: 0))
    assert hvd.local_rank() == 0
    monkeypatch.setenv("HVDPLUS_LOCAL_RANK", "2")
    assert hvd.local_rank() == 2
