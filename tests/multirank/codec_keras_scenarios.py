"""Every codec through the Keras adapter on TensorFlow, in a traced step; every function runs on every rank."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np

import hvdplus
import hvdplus.keras as hvd

hvd.init()
RANK = hvd.rank()
CODECS = ("exact", "int8", "int4:rounding=stochastic", "ternary", "onebit", "topk:0.05", "randomk:0.05", "powersgd:4")


def data(rank, rows=1024):
    generator = np.random.default_rng(rank)
    corners = np.random.default_rng(99).normal(size=(8, 32))
    labels = generator.integers(0, 8, rows)
    return (corners[labels] + generator.normal(size=(rows, 32))).astype("float32"), labels


def assert_equal_everywhere(model):
    flat = np.concatenate([w.ravel() for w in model.get_weights()]).tobytes()
    assert all(other == flat for other in hvd.allgather_object(flat))


def scenario_every_codec_trains_in_a_traced_step():
    found = {}
    for codec in CODECS:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(n, activation="tanh") for n in (96, 64)]
        model = keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(8)])
        opt = hvdplus.wrap(keras.optimizers.SGD(0.2, momentum=0.5), model=model, strategy=codec, min_compress=256)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=opt, loss=loss, jit_compile=False)
        before = model.evaluate(*data(77), verbose=0)
        for part in range(4):
            x, y = (array[part * 256 : part * 256 + 256] for array in data(RANK))
            model.fit(x, y, batch_size=32, epochs=1, verbose=0, shuffle=False)
            assert_equal_everywhere(model)
        found[codec] = model.evaluate(*data(77), verbose=0)
        stats = model.optimizer.hvdplus.stats()
        assert found[codec] < 0.5 * before, (codec, before, found[codec])
        assert codec == "exact" or stats["bytes_sent"] < 0.4 * stats["bytes_dense"], (codec, stats)
    return found
