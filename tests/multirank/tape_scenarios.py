"""The gradient tape in a launch of its own: nothing before it has met the other ranks."""

import zlib

import numpy as np
import pytest
import tensorflow as tf

import hvdplus.tensorflow as hvd
from hvdplus.collectives import AllGather
from hvdplus_tensorflow import _session

hvd.init()


def scenario_the_first_exchange_is_traced():
    variable = tf.Variable([1.0, 2.0])

    @tf.function
    def mean():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * (hvd.rank() + 1.0)
        return hvd.DistributedGradientTape(tape, strategy="exact").gradient(loss, variable)

    for _ in range(2):
        assert np.allclose(mean(), (hvd.size() + 1) / 2)


def scenario_a_traced_tape_goes_on_counting_steps():
    """A step is exact while it warms up; later ones draw other places each time, in a graph that is traced once."""
    for trace in (tf.function, lambda eager: eager):
        variable, slopes = tf.Variable(tf.zeros([5000])), tf.range(1.0, 5001.0)

        @trace
        def mean(variable=variable, slopes=slopes):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * slopes)
            strategy = "randomk:0.01,feedback=false,warmup_steps=1"
            return hvd.DistributedGradientTape(tape, strategy=strategy).gradient(loss, variable)

        first, *later = [mean().numpy() for _ in range(4)]
        assert np.allclose(first, slopes)
        places = [tuple(np.flatnonzero(found)) for found in later]
        assert [len(drawn) for drawn in places] == [50] * 3
        assert len(set(places)) == 3


def scenario_what_is_gathered_has_every_ranks_bits():
    """Of any dtype and number of bytes, eagerly and in a graph."""
    dtypes = ("bool", "int8", "uint8", "int16", "float16", "int32", "float32", "int64", "float64")
    for dtype, size in ((dtype, size) for dtype in dtypes for size in (1, 2, 3, 5, 1001)):
        raw = np.random.default_rng([hvd.rank(), size]).integers(0, 256, size * np.dtype(dtype).itemsize, np.uint8)
        mine = (raw % 2).astype(bool) if dtype == "bool" else raw.view(dtype)
        wanted = hvd.allgather_object(mine.tobytes())
        for trace in (tf.function, lambda eager: eager):

            @trace
            def gather(value, name=f"gather.{dtype}.{size}"):
                return _session.session().collectives.start(AllGather(value), name).result()

            assert [row.tobytes() for row in gather(tf.constant(mine)).numpy()] == wanted, (dtype, size)


def scenario_means_are_alike_and_stay_as_they_are():
    """Tensors of a step keep their values while later steps write into memory that is lent anew."""
    variables = [tf.Variable(tf.zeros([900, 400])), tf.Variable(tf.zeros([40_001]))]  # more than a mebibyte
    for codec in ("int8", "onebit", "topk:0.01", "powersgd:2", "fp16"):

        @tf.function
        def mean(slopes, codec=codec):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(v * slope) for v, slope in zip(variables, slopes, strict=True)])
            return hvd.DistributedGradientTape(tape, strategy=codec).gradient(loss, variables)

        found = []
        for step in range(4):
            drawn = [np.random.default_rng([step, rank]) for rank in range(hvd.size())]
            everyones = [[g.normal(size=v.shape).astype("f") for v in variables] for g in drawn]
            means = mean([tf.constant(slope) for slope in everyones[hvd.rank()]])
            found += [(tensor, tensor.numpy()) for tensor in means]
            if codec in ("int8", "fp16"):
                for tensor, *given in zip(means, *everyones, strict=True):
                    assert np.abs(tensor - np.mean(given, axis=0)).max() < 0.1
        assert all(np.array_equal(tensor, copy) for tensor, copy in found)
        mine = b"".join(copy.tobytes() for _, copy in found)
        assert len(set(hvd.allgather_object(zlib.crc32(mine)))) == 1


def scenario_a_source_that_only_some_ranks_use():
    used, unused = tf.Variable([1.0, 2.0]), tf.Variable([3.0])
    nobodys = tf.Variable([4.0])

    def gradients(everybody=False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(used) * (hvd.rank() + 1.0)
            if hvd.rank() == 0 or everybody:
                loss += 6.0 * tf.reduce_sum(unused)
        tape = hvd.DistributedGradientTape(tape, strategy="exact")
        return tape.gradient(loss, [used, unused, nobodys])

    mean, other, nothing = gradients()
    assert np.allclose(mean, (hvd.size() + 1) / 2)
    assert np.allclose(other, 6.0 / hvd.size()) and nothing is None
    assert np.allclose(tf.function(gradients)(everybody=True)[1], 6.0)
    if hvd.rank() == 0:
        tf.function(gradients)()
    else:
        text = f"has no gradient on rank {hvd.rank()} and one on other ranks in a traced step; use it on all ranks"
        with pytest.raises(tf.errors.OpError, match=text):
            tf.function(gradients)()
