"""The Keras adapter on one rank: what it refuses, what it leaves as it is, and how it is saved."""

import json
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import hvdplus
import hvdplus.keras as hvd
import hvdplus_keras

LSO = keras.optimizers.LossScaleOptimizer


def net():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)]
    return keras.Sequential([keras.layers.Input((5,)), *layers])


def data(rows=12):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 5)).astype("f"), rng.normal(size=(rows, 2)).astype("f")


def fit(optimizer, batch=4, **options):
    model = net()
    model.compile(optimizer, keras.losses.MeanSquaredError(), **options)
    model.fit(*data(), batch_size=batch, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hvdplus.wrap(3), "not an optimizer of a known framework"),
        (lambda: hvdplus.wrap(hvdplus.wrap(keras.optimizers.SGD())), "wrapped already"),
        (lambda: hvdplus.wrap(LSO(hvdplus.wrap(keras.optimizers.SGD()))), "wrapped already"),
        (lambda: hvd.DistributedOptimizer(net()), "not a keras.optimizers.Optimizer"),
        (lambda: hvdplus.wrap(keras.optimizers.SGD(), strategy="fp17"), "did you mean 'fp16'"),
        (lambda: hvdplus.wrap(keras.optimizers.SGD(), model=3), "not a keras.Model"),
        (lambda: hvdplus.wrap(keras.optimizers.SGD(), named_parameters=[]), "named_parameters= is for torch"),
        (lambda: hvdplus.wrap(keras.optimizers.SGD(gradient_accumulation_steps=2), accumulate=2), "would multiply"),
        (lambda: hvdplus.wrap(LSO(keras.optimizers.SGD(gradient_accumulation_steps=2)), accumulate=2), "multiply"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum), "not offered"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=17), "must be Average or Sum"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=int), "compression=int is not known"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0), "above 0"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), num_groups=-1), "must be 0 or more"),
        (
            lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=2, accumulate=3),
            "give one of the two",
        ),
    ],
)
def test_bad_input_is_one_sentence(make, words):
    with pytest.raises(hvdplus.StrategyError, match=words) as error:
        make()
    assert str(error.value).count(". ") == 0


def test_a_torch_optimizer_is_refused():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(hvdplus.StrategyError, match=r"is a torch.optim.sgd.SGD, not a keras.optimizers.Optimizer"):
        hvd.DistributedOptimizer(optimizer)


def test_jax_is_refused():
    program = (
        "import sys, types; import keras, hvdplus\n"
        "keras.backend.backend = lambda: 'jax'\n"
        "try: hvdplus.wrap(keras.optimizers.SGD())\n"
        "except hvdplus.StrategyError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "backend 'jax', which hvdplus does not serve" in done.stdout


def test_the_optimizer_stays_what_it_is():
    optimizer = keras.optimizers.Adam(0.01, name="mine")
    assert hvdplus.wrap(optimizer) is optimizer
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert optimizer.name == "mine"
    optimizer.learning_rate = 0.5
    assert float(optimizer.learning_rate) == 0.5
    assert int(optimizer.iterations) == 0
    assert optimizer.beta_1 == 0.9


@pytest.mark.parametrize("jit", [False, True])
def test_one_rank_is_the_plain_optimizer(jit):
    def make():
        return keras.optimizers.AdamW(0.01, clipnorm=0.1)

    wrapped = hvdplus.wrap(make(), strategy="fp16", min_compress=0)
    for a, b in zip(
        fit(wrapped, jit_compile=jit).get_weights(), fit(make(), jit_compile=jit).get_weights(), strict=True
    ):
        assert np.array_equal(a, b)
    assert wrapped.hvdplus.stats()["collectives"] == 0


def test_accumulation_updates_once_a_window():
    opt = hvdplus.wrap(keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1), accumulate=3)
    small, large = fit(opt), fit(keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1), batch=12)
    assert int(opt.iterations) == 1
    assert max(np.abs(a - b).max() for a, b in zip(small.get_weights(), large.get_weights(), strict=True)) < 1e-6


def test_updated_says_whether_a_window_was_closed():
    opt = hvdplus.wrap(keras.optimizers.SGD(0.1), accumulate=2)
    model = net()
    model.compile(opt, "mse")
    seen = []
    for _ in range(4):
        model.train_on_batch(*data())
        seen.append(opt.hvdplus.updated)
    assert seen == [False, True, False, True]


def test_a_compiled_step_is_refused_where_it_would_exchange():
    if keras.backend.backend() != "tensorflow":
        pytest.skip("only TensorFlow compiles with XLA")
    opt = hvdplus.wrap(keras.optimizers.SGD(0.1), accumulate=2)
    with pytest.raises(hvdplus.StrategyError, match="jit_compile=False"):
        fit(opt, jit_compile=True)
    model = net()
    hvdplus.wrap(keras.optimizers.SGD(0.1), model=model, accumulate=2)
    model.compile("sgd", "mse", jit_compile="auto")
    assert model.jit_compile is False


def test_apply_before_build_needs_variables():
    opt = hvdplus.wrap(keras.optimizers.SGD(0.1))
    with pytest.raises(hvdplus.StrategyError, match=r"optimizer\.build\(variables\)"):
        opt.apply([keras.ops.zeros(3)])


def test_config_round_trip():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    opt = hvdplus.wrap(keras.optimizers.Adam(schedule), strategy="fp16,accumulate=2")
    config = opt.get_config()
    for copy in (opt.from_config(config), type(opt).from_config(config)):
        assert copy.get_config() == config
    again = keras.optimizers.deserialize(keras.optimizers.serialize(opt))
    assert isinstance(again, keras.optimizers.Adam)
    assert again.hvdplus.strategy == opt.hvdplus.strategy
    json.dumps(config)


@pytest.mark.parametrize("ending", [".keras", ".h5"])
def test_loading_without_hvdplus_says_what_to_import(tmp_path, ending):
    path = tmp_path / f"model{ending}"
    fit(hvdplus.wrap(keras.optimizers.Adam(0.01))).save(path)
    program = "import sys, keras; keras.models.load_model(sys.argv[1])"
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "import hvdplus.keras first" in done.stderr


def test_no_private_name_of_keras_is_used():
    """Each rewrite of Keras' optimizers broke wrappers that reached into them."""
    own = r"(?!_exchanger\b|__class__)"
    for path in pathlib.Path(hvdplus_keras.__file__).parent.glob("*.py"):
        reached = re.findall(rf"\b(?:optimizer|model|variable|inner|owner|_LossScale)\.{own}_\w+", path.read_text())
        assert not reached, (path.name, reached)
