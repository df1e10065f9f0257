"""What a traced exchange measures in the steps that measure what is lost."""

import numpy as np
import pytest
import tensorflow as tf

from hvdplus.collectives import LocalCollectives
from hvdplus.plan import Parameter, plan
from hvdplus.stats import Stats
from hvdplus.strategy import Strategy
from hvdplus.watch import Watch
from hvdplus_tensorflow import _exchange
from hvdplus_tensorflow._arrays import TensorFlowArrays


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_a_step_that_is_not_finite_measures_nothing(codec):
    strategy = Strategy(codec, min_compress=0)
    planned = plan([Parameter("p", (5000,), "float32")], strategy)
    arrays, watch, cell = TensorFlowArrays(), Watch(0, 1), _exchange.variable_cell
    reducer = _exchange.TracedReducer(planned, strategy, LocalCollectives(), arrays, watch, "0", Stats(), cell)

    @tf.function(autograph=False)
    def error(values):
        buckets = [values, *(tf.zeros([bucket.count]) for bucket in planned.buckets[1:])]
        return reducer.trace(_exchange._SAMPLED, buckets, tf.constant(0))[1]

    values = np.random.default_rng(0).normal(size=planned.buckets[0].count).astype(np.float32)
    assert 0 < float(error(tf.constant(values))) < 0.01
    for bad in (np.inf, np.nan):
        values[17] = bad
        assert float(error(tf.constant(values))) < 0
