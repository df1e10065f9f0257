"""The gradient tape in a launch of its own: nothing before it has met the other ranks."""

import numpy as np
import tensorflow as tf

import hvdplus.tensorflow as hvd

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
