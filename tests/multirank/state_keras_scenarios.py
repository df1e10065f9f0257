"""What outlives a saved Keras model and a change of the loss scale; every function runs on every rank."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import pathlib
import tempfile
import warnings

import keras
import numpy as np
from lines import Lines

import hvdplus
import hvdplus.keras as hvd
from hvdplus_keras._optimizer import find

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
LSO = keras.optimizers.LossScaleOptimizer


def net():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((32,)), keras.layers.Dense(24, activation="tanh"), keras.layers.Dense(8)])


def data(steps):
    """Rows of this rank, eight a step."""
    generator = np.random.default_rng(RANK)
    x, y = generator.normal(size=(1000, 32)).astype("f"), generator.normal(size=(1000, 8)).astype("f")
    return x[8 * steps.start : 8 * steps.stop], y[8 * steps.start : 8 * steps.stop]


def compiled(codec, around=lambda optimizer: optimizer, inside=lambda optimizer: optimizer, **fields):
    model = net()
    fields = {"min_compress": 16, **fields}
    optimizer = inside(keras.optimizers.Adam(0.01))
    model.compile(
        around(hvdplus.wrap(optimizer, model=model, strategy=codec, **fields)), keras.losses.MeanSquaredError()
    )
    return model


def train(model, steps):
    model.fit(*data(steps), batch_size=8, shuffle=False, verbose=0)


def exchanged(model):
    return find(model.optimizer).optimizer.hvdplus


def bytes_of(model):
    everything = [*model.get_weights(), *(np.array(v) for v in model.optimizer.variables)]
    everything += [residual for _, residual in sorted(exchanged(model).residuals().items())]
    return [np.asarray(value).tobytes() for value in everything]


def reloaded(model, ending=".keras", everywhere=False):
    """The model as it comes back from a file of this rank's, or everywhere from rank 0's."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"model{ending}"
        model.save(path)
        if everywhere:
            path.write_bytes(hvd.broadcast_object(path.read_bytes(), 0))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Skipping variable loading")
            return keras.models.load_model(path)


def named(residuals):
    """Residuals in the order of their variables, whose names Keras may have numbered anew."""
    return list(residuals.values())


def sum_over_ranks(arrays):
    return [sum(parts) for parts in zip(*hvd.allgather_object(arrays), strict=True)]


def assert_close(found, expected, tolerance=1e-6):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=tolerance)


def resume(codec, window=1, ending=".keras"):
    """Break a run in the middle, each rank with a file of its own; it must not show."""
    model = compiled(codec, accumulate=window, warmup_steps=1)
    train(model, range(4 * window))
    assert exchanged(model).residual_norm() > 0
    back = reloaded(model, ending)
    for each in (model, back):
        train(each, range(4 * window, 8 * window))
    assert bytes_of(back) == bytes_of(model), codec


def scenario_a_resumed_run_is_the_unbroken_one():
    for codec in ("int8:rounding=stochastic", "topk:0.05", "powersgd:2"):
        resume(codec)
    for codec in ("onebit", "randomk:0.05"):
        resume(codec, window=2, ending=".h5")


def save_on_rank_zero(around, ending):
    model = compiled("onebit", around)
    train(model, range(3))
    before = undelivered(model)
    exchanged(model).consolidate()
    assert_close(undelivered(model), before)
    mean = named(exchanged(model).residuals())
    assert_close(mean, [total / SIZE for total in before])
    with Lines() as lines:
        back = reloaded(model, ending, everywhere=True)
        if ending == ".h5":  # Keras builds the optimizer later then
            find(back.optimizer).owner.build(back.trainable_variables)
        assert_close(named(exchanged(back).residuals()), mean, 0)
    assert lines.of_all(hvd) == []
    train(back, range(3, 5))
    exchanged(back).verify()


def scenario_rank_zero_saves_for_all():
    save_on_rank_zero(LSO, ".keras")
    save_on_rank_zero(lambda optimizer: optimizer, ".h5")


def undelivered(model):
    """What all ranks together have not delivered; what was lost as a server counts for all of them."""
    from hvdplus.arrays import NumPyArrays
    from hvdplus.state import owed

    memory = find(model.optimizer).memory
    total = owed([memory.kept()], SIZE, memory._counts, NumPyArrays())
    return sum_over_ranks([total[name].values.reshape(r.shape) for name, r in exchanged(model).residuals().items()])


def scenario_rank_zero_saves_for_itself():
    for ending in (".keras", ".h5"):
        model = compiled("powersgd:2")
        train(model, range(3))
        if RANK == 0:
            expected = named(exchanged(model).residuals())
        else:
            expected = [0 * residual for residual in named(exchanged(model).residuals())]
        with Lines() as lines:
            back = reloaded(model, ending, everywhere=True)
            back.optimizer.build(back.trainable_variables)
        (line,) = lines.of_all(hvd)
        assert f"rank 0 of {SIZE} only" in line and "optimizer.hvdplus.consolidate()" in line
        assert_close(named(exchanged(back).residuals()), expected, 0)
        train(back, range(3, 5))
        exchanged(back).verify()


def scenario_after_an_update_a_consolidated_state_is_a_ranks_own_again():
    model = compiled("onebit")
    train(model, range(2))
    exchanged(model).consolidate()
    train(model, range(2, 3))
    with Lines() as lines:
        reloaded(model, everywhere=True)
    assert len(lines.of_all(hvd)) == 1


def scenario_another_number_of_ranks():
    """A file that looks as if twice as many ranks had consolidated and saved it."""
    for ending in (".keras", ".h5"):
        model = compiled("onebit", LSO if ending == ".keras" else lambda optimizer: optimizer)
        train(model, range(2))
        exchanged(model).consolidate()
        mean, memory = named(exchanged(model).residuals()), find(model.optimizer).memory
        memory._origin.assign([0, 2 * SIZE, int(memory._exchanges)])
        with Lines() as lines:
            back = reloaded(model, ending, everywhere=True)
            find(back.optimizer).owner.build(back.trainable_variables)
        (line,) = lines.of_all(hvd)
        assert f"{2 * SIZE} ranks" in line and f"loaded on {SIZE}" in line
        assert_close(named(exchanged(back).residuals()), [2 * residual for residual in mean])
        train(back, range(2, 4))
        exchanged(back).verify()


def scenario_another_strategy_keeps_the_optimizer():
    """Another plan has other variables: all that the optimizer itself knows is loaded, and what still fits."""
    model = compiled("topk:0.05")
    train(model, range(3))
    residuals, plain = named(exchanged(model).residuals()), own_variables(model)
    for strategy in ("randomk:0.2", "exact"):
        other = compiled(strategy, bucket_bytes=2**20)
        with Lines() as lines:
            store = {}
            model.optimizer.save_own_variables(store)
            other.optimizer.load_own_variables(store)
        assert_close(own_variables(other), plain, 0)
        if strategy == "exact":
            (line,) = lines.of_all(hvd)
            assert "dropped" in line and "kernel (residual)" in line
        else:
            assert lines.of_all(hvd) == []
            assert_close(named(exchanged(other).residuals()), residuals, 0)
    lately = compiled("exact")
    find(lately.optimizer).optimizer.set_weights([np.array(v) for v in model.optimizer.variables])
    assert_close(own_variables(lately), plain, 0)


def own_variables(model):
    exchanger = find(model.optimizer)
    return [np.array(v) for v in exchanger.without_added(model.optimizer.variables)]


def scenario_a_plain_optimizer_s_variables_clear_residuals():
    model, plain = compiled("onebit"), net()
    plain.compile(keras.optimizers.Adam(0.01), "mse")
    for each in (model, plain):
        train(each, range(2))
    store = {}
    plain.optimizer.save_own_variables(store)
    assert exchanged(model).residual_norm() > 0
    model.optimizer.load_own_variables(store)
    assert exchanged(model).residual_norm() == 0
    assert_close(own_variables(model), [np.array(v) for v in plain.optimizer.variables], 0)


def scenario_cleared_residuals():
    model = compiled("onebit")
    assert exchanged(model).residual_norm() == 0
    train(model, range(2))
    flat = np.concatenate([residual.ravel() for residual in exchanged(model).residuals().values()])
    assert abs(exchanged(model).residual_norm() - np.linalg.norm(flat)) < 1e-5 * np.linalg.norm(flat)
    exchanged(model).clear_residuals()
    assert exchanged(model).residual_norm() == 0


def scale(codec, window=1, where=("around", "inside")):
    """A loss scale that grows is seen neither in the weights nor in what is kept, whichever is around the other."""
    plain = compiled(codec, accumulate=window)
    train(plain, range(6 * window))
    for place in where:
        scaled = {place: lambda optimizer: LSO(optimizer, initial_scale=2.0**10, dynamic_growth_steps=2)}
        model = compiled(codec, accumulate=window, **scaled)
        train(model, range(6 * window))
        assert float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale)) == 2.0**13
        assert_close(model.get_weights(), plain.get_weights())
        assert_close(named(exchanged(model).residuals()), named(exchanged(plain).residuals()), 1e-7)


def scenario_residuals_are_in_the_unit_of_true_gradients():
    scale("powersgd:2")
    scale("onebit", window=2)


def scenario_a_step_that_is_not_finite_leaves_no_trace():
    for codec in ("onebit", "powersgd:2"):
        model = compiled(codec, LSO)
        train(model, range(2))
        expected = bytes_of(model)[-1]
        x, y = data(range(2, 3))
        model.train_on_batch(x * np.float32(np.nan if RANK == SIZE - 1 else 1.0), y)
        assert bytes_of(model)[-1] == expected, codec


def scenario_the_end_of_the_data_takes_nothing_from_what_is_kept():
    """Nobody has anything to give in the exchange that finds out that all have come to the end."""
    for codec in ("int4", "topk:0.1"):
        whole, parts = compiled(codec), compiled(codec)
        train(whole, range(6))
        train(parts, range(3))
        before = [residual.tobytes() for residual in exchanged(parts).residuals().values()]
        exchanged(parts).join()
        assert [residual.tobytes() for residual in exchanged(parts).residuals().values()] == before, codec
        train(parts, range(3, 6))
        assert bytes_of(parts) == bytes_of(whole), codec


def scenario_the_broadcast_callback_leaves_a_ranks_own_to_it():
    model = compiled("onebit")
    train(model, range(3))
    before = [residual.tobytes() for residual in exchanged(model).residuals().values()]
    assert len(set(map(str, hvd.allgather_object(before)))) == SIZE
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_batch_begin(0)
    assert [residual.tobytes() for residual in exchanged(model).residuals().values()] == before
    train(model, range(3, 4))


def scenario_a_layer_that_was_frozen_after_compiling_is_saved_and_loaded():
    model = compiled("int8")
    train(model, range(2))
    model.layers[0].trainable = False
    again = reloaded(model)
    train(again, range(2, 3))
