"""What the Keras adapter must do on several ranks; every function runs on every rank, on either backend."""

import itertools
import os
import pathlib
import tempfile
from functools import partial

import keras
import numpy as np
import parity
import pytest

import hvdplus
import hvdplus.keras as hvd
from hvdplus_keras._optimizer import find

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
TF = keras.backend.backend() == "tensorflow"
if TF:
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(2)  # init() has left TensorFlow's devices alone
else:
    import torch

    torch.set_num_threads(1)

LSO = keras.optimizers.LossScaleOptimizer


def net(seed=0, dtype=None):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(24, activation="tanh", dtype=dtype), keras.layers.Dense(3, dtype=dtype)]
    return keras.Sequential([keras.layers.Input((6,)), *layers])


def data(rows, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 6)).astype("f"), rng.normal(size=(rows, 3)).astype("f")


def mine(batches, rows=4, window=1):
    """The rows of this rank, when a batch of all ranks (and of a window's micro-batches) is a run of rows."""
    spots = [((b * window + i) * SIZE + RANK) * rows for b in range(batches) for i in range(window)]
    return np.concatenate([np.arange(spot, spot + rows) for spot in spots])


def weights(thing):
    return [keras.ops.convert_to_numpy(v) for v in thing.variables]


def shared(optimizer):
    """All variables but the one that says which rank holds them."""
    return [keras.ops.convert_to_numpy(v) for v in optimizer.variables if v.name != "hvdplus_origin"]


def difference(a, b):
    return max(float(np.abs(x - y).max()) for x, y in zip(a.get_weights(), b.get_weights(), strict=True))


def assert_equal_everywhere(*arrays):
    raw = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
    assert len(set(hvd.allgather_object(raw))) == 1


def fit_both(make, updates=12, window=1, rows=4, **options):
    """Fit on all ranks with different data, and alone on the whole batch; return models and optimizer."""
    model, alone = net(RANK), net(0)
    x, y = data(updates * window * SIZE * rows)
    opt = hvdplus.wrap(make(), model=model, accumulate=window, **options)
    own = mine(updates, rows, window)
    model.compile(opt, "mse")
    model.fit(x[own], y[own], batch_size=rows, shuffle=False, verbose=0)
    alone.compile(make(), "mse")
    alone.fit(x, y, batch_size=rows * SIZE * window, shuffle=False, verbose=0)
    assert_equal_everywhere(*model.get_weights())
    return model, alone, opt


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adamw clipnorm": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.05),
    "adam global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05),
    "adam clipvalue": lambda: keras.optimizers.Adam(0.01, clipvalue=0.01),
    "sgd ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
}


def scenario_fit_is_the_whole_batch():
    worst = 0.0
    for window in (1, 3):
        for name, make in list(OPTIMIZERS.items())[: 1 if window == 1 else None]:
            model, alone, opt = fit_both(make, updates=6, window=window)
            found = difference(model, alone)
            assert found < 1e-6, (name, window, found)
            assert int(opt.iterations) == 6
            assert opt.hvdplus.stats()["steps"] == 6
            worst = max(worst, found)
    return worst


def scenario_stats_count_steps_not_traces():
    _, _, opt = fit_both(OPTIMIZERS["sgd"], updates=20, strategy="fp16", min_compress=0)
    stats = opt.hvdplus.stats()
    assert stats["steps"] == 20
    rounds = 2 if SIZE > 2 else 1  # of the fp16 bucket; and one of the flags
    assert stats["collectives"] == 20 * rounds + 20
    assert 0 < stats["bytes_sent"] < 0.6 * stats["bytes_dense"]
    assert 0 < stats["relative_error"] < 1e-3
    assert type(opt).__mro__[1].__name__ == "Distributed"
    assert isinstance(opt, keras.optimizers.SGD)


def scenario_a_step_is_traced_once():
    if not TF:
        return
    from hvdplus.codecs import registry
    from hvdplus.codecs.exact import Exact

    traces = []

    class Counting(Exact):
        lossy = False

        def exchange(self, x, site):
            traces.append(site.name)
            return (yield from super().exchange(x, site))

    registry._MAKERS["counting"] = Counting
    try:
        fit_both(OPTIMIZERS["sgd"], updates=20, strategy="counting", min_compress=0)
    finally:
        del registry._MAKERS["counting"]
    assert len(traces) <= 3  # made ready, plain, sampled


def scenario_custom_loops():
    x, y = data(6 * SIZE * 4)
    own = mine(6)
    finals = []
    for form in ("apply", "keywords", "zip", "graph", "train_on_batch"):
        model = net(RANK)
        opt = hvdplus.wrap(OPTIMIZERS["sgd"](), model=model)
        step = stepper(model, opt, form)
        for i in range(6):
            rows = own[4 * i : 4 * i + 4]
            step(x[rows], y[rows])
        assert opt.hvdplus.stats()["steps"] == 6
        assert opt.hvdplus.updated
        assert_equal_everywhere(*model.get_weights())
        finals.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    for other in finals[1:]:
        assert np.abs(finals[0] - other).max() < 1e-6


def stepper(model, opt, form):
    if form == "train_on_batch":
        model.compile(opt, "mse")
        return model.train_on_batch

    def give(grads):
        if form == "keywords":
            opt.apply(grads=grads, trainable_variables=model.trainable_variables)
        elif form == "zip":
            opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        else:
            opt.apply(grads, model.trainable_variables)

    def step(x, y):
        give(gradients(model, x, y))

    return tf.function(step) if TF and form == "graph" else step


def gradients(model, x, y, loss=None):
    y = keras.ops.convert_to_tensor(y)
    loss = loss or (lambda prediction: keras.ops.mean((prediction - y) ** 2))
    if TF:
        with tf.GradientTape() as tape:
            value = loss(model(x))
        return tape.gradient(value, model.trainable_variables)
    model.zero_grad()
    loss(model(x)).backward()
    return [v.value.grad for v in model.trainable_variables]


def scenario_loss_scale_in_every_order():
    """An inf on rank 1 at step 3 skips that step on all ranks, and scales stay equal."""
    seen = {}
    for order in ("outside", "inside", "compile"):
        for window in (1, 2):
            model = net(RANK, "mixed_float16" if order == "compile" else None)
            if order == "compile":  # a model whose own policy is mixed_float16
                model.dtype_policy = keras.dtype_policies.get("mixed_float16")
            inner = keras.optimizers.SGD(0.05, momentum=0.9)
            if order == "inside":
                opt = hvdplus.wrap(LSO(inner, initial_scale=64.0), model=model, accumulate=window)
            else:
                opt = hvdplus.wrap(inner, model=model, accumulate=window)
                if order == "outside":
                    opt = LSO(opt, initial_scale=64.0)
            model.compile(opt, "mse")
            assert isinstance(model.optimizer, LSO)
            x, y = data(8 * window * SIZE * 4)
            own = mine(8, 4, window)
            skipped = window * 2  # a micro-batch of the third update
            if RANK == 1:
                x[own[4 * skipped]] = np.inf
            before = None
            for i in range(8 * window):
                if i == 2 * window:
                    before = model.get_weights()
                rows = own[4 * i : 4 * i + 4]
                model.train_on_batch(x[rows], y[rows])
                if i == 3 * window - 1:
                    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)), order
            scale = float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale))
            assert scale == (2.0**15 if order == "compile" else 64.0) / 2, (order, scale)
            assert int(model.optimizer.iterations) == 7, (order, window, int(model.optimizer.iterations))
            assert np.isfinite(np.concatenate([w.ravel() for w in model.get_weights()])).all()
            assert_equal_everywhere(*model.get_weights(), *weights(model.optimizer)[:4])
            seen[f"{order} {window}"] = scale
    return seen


def scenario_none_frozen_and_embedding():
    keras.utils.set_random_seed(0)
    words = keras.layers.Input((5,), dtype="int32")
    hidden = keras.layers.Embedding(50, 4, name="words")(words)
    flat = keras.layers.Flatten()(hidden)
    frozen = keras.layers.Dense(7, trainable=False)(flat)
    model = keras.Model(words, keras.layers.Dense(2)(frozen))
    spare = keras.layers.Dense(3)
    spare.build((4,))
    for window in (1, 2):
        opt = hvdplus.wrap(keras.optimizers.Adam(0.01), accumulate=window)
        variables = [*model.trainable_variables, *spare.trainable_variables]
        before = [np.array(v) for v in spare.trainable_variables]

        step = partial(embedding_step, model, opt, variables)
        step = tf.function(step) if TF else step
        rng = np.random.default_rng(RANK)
        for _ in range(4):
            step(rng.integers(0, 50, (3, 5)), rng.normal(size=(3, 2)).astype("f"))
        assert_equal_everywhere(*(np.array(v) for v in model.trainable_variables))
        assert all(np.array_equal(a, np.array(v)) for a, v in zip(before, spare.trainable_variables, strict=True))
        assert int(opt.iterations) == 4 // window


def embedding_step(model, opt, variables, x, y):
    grads = gradients(model, x, y)
    opt.apply_gradients(itertools.zip_longest(grads, variables))


def scenario_a_gradient_on_one_rank_only_in_a_traced_step():
    if not TF:
        return
    a, b = keras.Variable(np.ones(3, "f")), keras.Variable(np.ones(3, "f"))
    opt = hvdplus.wrap(keras.optimizers.SGD(0.1), strategy="exact")

    @tf.function
    def step():
        opt.apply([tf.ones(3), tf.ones(3) if RANK == 0 else None], [a, b])

    with pytest.raises(Exception, match=r"gradient on rank \d and on 50% of all ranks in a traced step"):
        step()


def scenario_ranks_may_start_apart():
    """Without model=, the first step is rank 0's alone: its weights and its gradient."""
    x, y = data(SIZE * 4)
    own = mine(1)
    for form in ("apply", "graph", "train_on_batch"):
        model, alone = net(RANK), net(0)
        opt = hvdplus.wrap(OPTIMIZERS["sgd"]())
        stepper(model, opt, form)(x[own], y[own])
        alone.compile(OPTIMIZERS["sgd"](), "mse")
        alone.train_on_batch(x[:4], y[:4])
        assert difference(model, alone) < 1e-6, form
        assert_equal_everywhere(*model.get_weights(), *shared(opt))


def scenario_weights_that_part_are_an_error():
    model = net(0)
    opt = hvdplus.wrap(OPTIMIZERS["sgd"](), model=model)
    x, y = data(8)
    model.compile(opt, "mse")
    model.train_on_batch(x[:4], y[:4])
    model.layers[0].kernel.assign_add(keras.ops.full((6, 24), float(RANK)))
    with pytest.raises(hvdplus.ExchangeError, match=r"kernel .*must be equal after update 1"):
        opt.hvdplus.verify()


def scenario_noise_in_the_first_update_is_an_error():
    class Noisy(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)
            variable.assign_add(keras.ops.full(variable.shape, float(RANK)))

    model = net(0)
    model.compile(hvdplus.wrap(Noisy(0.1), model=model), "mse")
    with pytest.raises(Exception, match=r"must be equal after update 1"):  # TensorFlow wraps it in a class of its own
        model.train_on_batch(*data(4))


def scenario_ranks_must_agree():
    for field, strategy in (("codec", "fp16" if RANK else "exact"), ("accumulate", f"exact,accumulate={1 + RANK}")):
        model = net(0)
        with pytest.raises(Exception, match=f"rank 0 has {field} .*but rank"):
            hvdplus.wrap(OPTIMIZERS["sgd"](), model=model, strategy=strategy)
    model = net(0)
    with pytest.raises(Exception, match=r"rank 0 has optimizer SGD.*but rank"):
        hvdplus.wrap(OPTIMIZERS["adam clipvalue" if RANK else "sgd"](), model=model)


def wrap_for_saving(optimizer):
    return hvdplus.wrap(optimizer, strategy="bf16,feedback=true,accumulate=2,min_compress=0")


def scenario_save_and_load():
    x, y = data(12 * SIZE * 4)
    own = mine(12)
    for ending in (".keras", ".h5"):
        for around in (lambda o: LSO(wrap_for_saving(o)), wrap_for_saving, lambda o: wrap_for_saving(LSO(o))):
            model = net(RANK)
            opt = around(keras.optimizers.Adam(0.01))
            model.compile(opt, keras.losses.MeanSquaredError())
            model.fit(x[own[:28]], y[own[:28]], batch_size=4, shuffle=False, verbose=0)  # 7 batches: half a window
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder) / f"model{ending}"
                model.save(path)
                back = keras.models.load_model(path)
            assert find(back.optimizer).strategy == find(opt).strategy
            if ending == ".h5":  # Keras builds the optimizer at its first step then
                back.optimizer.build(back.trainable_variables)
            for a, b, v in zip(weights(opt), weights(back.optimizer), opt.variables, strict=True):
                assert np.array_equal(a, b), v.path
            assert sum("residual" in v.path for v in opt.variables) == 1
            assert int(back.optimizer.iterations) == 3
            for m in (model, back):
                m.fit(x[own[28:]], y[own[28:]], batch_size=4, shuffle=False, verbose=0)
            assert difference(model, back) == 0
            assert int(back.optimizer.iterations) == 6
            assert_equal_everywhere(*back.get_weights())


def scenario_load_only_rank_zero_trained():
    """A checkpoint that was not the same on all ranks is found out at the first step."""
    x, y = data(SIZE * 8)
    model = net(RANK)
    model.compile(hvdplus.wrap(keras.optimizers.Adam(0.01)), "mse")
    model.optimizer.build(model.trainable_variables)
    own = mine(2)
    model.fit(x[own], y[own], batch_size=4, verbose=0, shuffle=False)
    assert_equal_everywhere(*model.get_weights(), *shared(model.optimizer))


def scenario_load_model_wraps():
    model = net(0)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plain.keras")
        model.save(path)
        back = hvd.load_model(path)
    assert back.optimizer.hvdplus.world.size == SIZE
    x, y = data(SIZE * 8)
    own = mine(2)
    back.fit(x[own], y[own], batch_size=4, verbose=0)
    assert_equal_everywhere(*back.get_weights())


def scenario_uneven_data():
    """One rank has fewer batches, or none: nobody hangs, nobody diverges, and each mean is over those with data."""
    for window in (1, 2):
        for batches, epochs in (((5, 3), 1), ((5, 3), 2), ((4, 0), 1)):
            if SIZE > 2 and epochs > 1:
                continue
            mine_now = batches[min(RANK, 1)]
            model = net(0)
            opt = hvdplus.wrap(OPTIMIZERS["sgd"](), model=model, accumulate=window)
            model.compile(opt, "mse")
            x, y = data(max(1, mine_now) * 4, seed=RANK)
            if mine_now:
                model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
            else:
                opt.finalize_variable_values(model.trainable_variables)
            assert_equal_everywhere(*model.get_weights(), int(opt.iterations))
            assert len({int(opt.iterations)}) == 1
    # rank 0 alone has data: as if it were alone
    model, alone = net(0), net(0)
    opt = hvdplus.wrap(OPTIMIZERS["sgd"](), model=model)
    x, y = data(16)
    if RANK == 0:
        model.compile(opt, "mse")
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    else:
        opt.hvdplus.join()
    alone.compile(OPTIMIZERS["sgd"](), "mse")
    alone.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert difference(model, alone) < 1e-6
    assert_equal_everywhere(*model.get_weights())


def scenario_uneven_data_with_callbacks():
    model = net(0)
    opt = hvdplus.wrap(OPTIMIZERS["sgd"](), model=model)
    model.compile(opt, "mse")
    x, y = data((5 if RANK == 0 else 3) * 4, seed=RANK)
    callbacks = [hvd.callbacks.MetricAverageCallback(), hvd.callbacks.EarlyStopping("loss", patience=1, min_delta=10)]
    history = model.fit(x, y, batch_size=4, epochs=5, shuffle=False, verbose=0, callbacks=callbacks).history
    assert len(history["loss"]) == 2
    assert_equal_everywhere(*model.get_weights(), np.array(history["loss"]))


def scenario_one_rank_stops_early():
    """Keras' own EarlyStopping on one rank alone: that rank follows the others."""
    model = net(0)
    opt = hvdplus.wrap(OPTIMIZERS["sgd"](), model=model)
    model.compile(opt, "mse")
    x, y = data(12, seed=RANK)
    stop = [keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10)] if RANK else []
    model.fit(x, y, batch_size=4, epochs=5, shuffle=False, verbose=0, callbacks=stop)
    assert int(opt.iterations) == 15
    assert_equal_everywhere(*model.get_weights())


def scenario_callbacks():
    model = net(RANK)
    opt = hvdplus.wrap(keras.optimizers.SGD(0.1))
    model.compile(opt, "mse", metrics=["mae"])
    x, y = data(16, seed=RANK)
    rates = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    with tempfile.TemporaryDirectory() as folder:
        best = os.path.join(folder, "best.keras")
        calls = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(SIZE - 1),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, verbose=0),
            hvd.callbacks.LearningRateScheduleCallback(0.1, 0.1, start_epoch=2),
            hvd.callbacks.BestModelCheckpoint("loss", filepath=best),
            Watch(),
        ]
        history = model.fit(x, y, batch_size=4, epochs=4, shuffle=False, verbose=0, callbacks=calls).history
        assert os.path.exists(best) == (RANK == 0)
    expected = [(1 / SIZE) * (e * (SIZE - 1) / 2 + 1) * 0.1 for e in np.arange(1, 9) / 4] + [0.1] * 4 + [0.01] * 4
    assert np.allclose(rates, expected), rates
    assert_equal_everywhere(*model.get_weights(), *(np.array(history[k]) for k in ("loss", "mae", "lr")))


def scenario_broadcast_before_the_first_forward():
    model = net(RANK)
    hvdplus.wrap(keras.optimizers.Adam(0.01), model=model)
    assert difference(model, net(0)) == 0
    late = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    late.compile(hvdplus.wrap(keras.optimizers.Adam(0.01), model=late), "mse")
    keras.utils.set_random_seed(RANK)
    x, y = data(4 * SIZE)
    late.fit(x[4 * RANK : 4 * RANK + 4], y[4 * RANK : 4 * RANK + 4, :2], verbose=0)
    assert_equal_everywhere(*(np.array(v) for v in late.trainable_variables))


def scenario_batch_shapes_and_steps_per_execution():
    model = net(RANK)
    opt = hvdplus.wrap(OPTIMIZERS["sgd"](), model=model)
    model.compile(opt, "mse", steps_per_execution=3 if TF else 1)
    x, y = data(4 * 7 + 1 + RANK, seed=RANK)  # the last batch is of another size, and not the same on all ranks
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert_equal_everywhere(*model.get_weights())
    assert int(opt.iterations) == 16


def scenario_horovod_arguments():
    x, y = data(4 * SIZE * 2)
    own = mine(2)
    for average in (False, True):
        model, alone = net(0), net(0)
        opt = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.05),
            name="Distributed",
            compression=hvd.Compression.none,
            backward_passes_per_step=2,
            average_aggregated_gradients=average,
            num_groups=1,
            sparse_as_dense=True,
        )
        assert opt.name == "Distributed"
        model.compile(opt, "mse")
        model.fit(x[own], y[own], batch_size=4, shuffle=False, verbose=0)
        alone.compile(keras.optimizers.SGD(0.05 * (1 if average else 2)), "mse")
        alone.fit(x, y, batch_size=8 * SIZE, shuffle=False, verbose=0)
        assert difference(model, alone) < 1e-6
    total, alone = net(0), net(0)
    total.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), op=hvd.Sum), "mse")
    total.fit(x[own], y[own], batch_size=4, shuffle=False, verbose=0)
    alone.compile(keras.optimizers.SGD(0.01 * SIZE), "mse")
    alone.fit(x, y, batch_size=4 * SIZE, shuffle=False, verbose=0)
    assert difference(total, alone) < 1e-6


def scenario_local_layers():
    x, y = data(4 * SIZE * 4)
    own = mine(4)
    for window in (1, 2):
        model = net(0)
        opt = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), accumulate=window, local_layers=model.layers[0], scale_local_gradients=False
        )
        model.compile(opt, "mse")
        model.fit(x[own], y[own], batch_size=4, shuffle=False, verbose=0)
        assert_equal_everywhere(*model.layers[1].get_weights())
        kernels = hvd.allgather_object(np.array(model.layers[0].kernel))
        assert not np.array_equal(kernels[0], kernels[1])
        opt.hvdplus.verify()


def scenario_a_local_gradient_that_is_not_finite_is_seen_by_every_loss_scaling():
    own, shared = keras.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])
    partial = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1))
    partial.register_local_var(own)
    scaled = keras.optimizers.LossScaleOptimizer(partial, initial_scale=8.0)
    for bad in (False, True, False):
        local = [float("inf") if bad and RANK == 0 else 8.0] * 2
        grads = [keras.ops.convert_to_tensor(values) for values in (local, [8.0, 8.0])]
        scaled.apply(grads, [own, shared])
    assert (
        hvd.allgather_object((np.array(shared).tolist(), float(scaled.dynamic_scale)))
        == [(np.array(shared).tolist(), 4.0)] * SIZE
    )
    assert np.isfinite(np.array(own)).all()


def scenario_collectives():
    value = np.arange(4, dtype="f") + RANK
    assert np.allclose(hvd.allreduce(value), np.arange(4) + (SIZE - 1) / 2)
    assert np.array(hvd.allgather(value)).shape == (4 * SIZE,)
    assert np.allclose(hvd.broadcast(value, SIZE - 1), np.arange(4) + SIZE - 1)
    assert hvd.broadcast_object({"rank": RANK}, 0) == {"rank": 0}


def scenario_tape():
    """``hvdplus.tensorflow``: a tape, in a graph and eagerly, with Horovod's means and in codecs of ours."""
    if not TF:
        return
    import hvdplus.tensorflow as tf_hvd

    variables = [tf.Variable(tf.fill([50], float(RANK))), tf.Variable(tf.zeros([3]))]
    for variable in variables:
        variable.assign(variable + RANK)
    tf_hvd.broadcast_variables(variables, 0)
    assert float(tf.reduce_sum(variables[0])) == 0
    for strategy in ("exact", "fp16,min_compress=0", "bf16,feedback=true,min_compress=0"):

        def means(strategy=strategy):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variables[0]) * (RANK + 1.0) + tf.reduce_sum(variables[1]) * 2.0
            return tf_hvd.DistributedGradientTape(tape, strategy=strategy).gradient(loss, variables)

        for form in (means, tf.function(means)):
            for _ in range(2):
                first, second = form()
                assert np.allclose(first, (SIZE + 1) / 2)
                assert np.allclose(second, 2.0)


def scenario_warmup_travels_exact():
    _, _, opt = fit_both(OPTIMIZERS["sgd"], updates=4, strategy="fp16,warmup_steps=4", min_compress=0)
    stats = opt.hvdplus.stats()
    assert stats["bytes_sent"] == stats["bytes_dense"]


def scenario_parity():
    """Return the parameters after 20 steps, to be compared with those of other frameworks."""
    return {case: keras_run(*case.split("|")) for case in parity.CASES}


def keras_run(optimizer, codec, window):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((6,)), keras.layers.Dense(24, activation="tanh"), keras.layers.Dense(3)]
    )
    for layer, (weight, bias) in zip(model.layers, parity.start(), strict=True):
        layer.kernel.assign(weight)
        layer.bias.assign(bias)
    make = {
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.01, epsilon=parity.EPSILON),
    }[optimizer]
    opt = hvdplus.wrap(make(), model=model, strategy=codec, accumulate=int(window), min_compress=0)
    model.compile(opt, "mse")
    x, y = parity.data(SIZE, int(window))
    own = mine(parity.STEPS, parity.ROWS, int(window))
    model.fit(x[own], y[own], batch_size=parity.ROWS, shuffle=False, verbose=0)
    return np.concatenate([w.ravel() for w in model.get_weights()]).tolist()
