"""The compiled loops against their twins, the codecs' own array operations on NumPy arrays: the same bits."""

import logging

import arrays_cases
import numpy as np
import pytest

from hvdplus import codecs, kernels
from hvdplus.arrays import NumPyArrays
from hvdplus.codecs import ErrorFeedback
from hvdplus.testing import Wire, lockstep

pytest.importorskip("numba")

REFERENCE = NumPyArrays()
SPECS = ["int8", "int4", "int4:block=8", "ternary", "onebit", "onebit:8", "fp16", "bf16", "topk:0.3", "randomk:0.3"]


class Counting(kernels.HostArrays):
    """Notes that loops were called."""

    calls = 0

    def on_host(self, function, inputs, outputs):
        self.calls += 1
        return super().on_host(function, inputs, outputs)


def path(spec, arrays, steps):
    """The means of all steps, and every cell of every rank after the last."""
    sites = Wire(steps.shape[1], halves=False).sites(arrays)
    for site in sites:
        site.keep_sent, site.shapes = False, ((50, steps.shape[2] // 50), (steps.shape[2] % 50,))
    codec = codecs.make(spec)
    codec = ErrorFeedback(codec) if codec.lossy else codec
    means = [lockstep(codec, list(inputs), sites=sites)[0].mean.copy() for inputs in steps]
    return means + [cell.read() for site in sites for _, cell in sorted(site.cells.items())]


def gradients(size, count):
    """Four steps: normal, of many sizes with zeros among them, one that is not finite, tiny."""
    generator = np.random.default_rng(count)
    steps = generator.standard_normal((4, size, count)).astype(np.float32)
    steps[1] *= np.exp(generator.uniform(-20, 20, steps[1].shape)) * generator.integers(0, 2, steps[1].shape)
    steps[2, -1, count // 2] = [np.nan, np.inf][count % 2]
    steps[3] *= 1e-40
    return steps


@pytest.mark.parametrize("count", [1, 7, 64, 1000, 5001, 70_001])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_every_loop_gives_its_twins_bits(spec, size, count):
    steps, arrays = gradients(size, count), Counting()
    expected, found = path(spec, REFERENCE, steps), path(spec, arrays, steps)
    assert arrays.calls >= 2 * len(steps)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(*(np.where(np.isfinite(x), x, np.nan) for x in (mine, theirs)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_low_rank_products_agree(size):
    steps, arrays = gradients(size, 5007)[[0, 2, 0]], Counting()
    for mine, theirs in zip(path("powersgd:2", arrays, steps), path("powersgd:2", REFERENCE, steps), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5)
    assert arrays.calls == 3 * 3 * size


def test_large_arrays_are_sampled_for_a_threshold_and_nothing_is_missed():
    x = np.random.default_rng(0).standard_normal(400_000).astype(np.float32)
    x[200_000:] *= 30  # no sample's guess fits all of it
    steps = np.stack([x, x[::-1].copy()])[None]
    for mine, theirs in zip(path("topk:0.01", Counting(), steps), path("topk:0.01", REFERENCE, steps), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    drift = np.sort(np.abs(x))[np.newaxis, np.newaxis].astype(np.float32)  # a sample sees too few large ones
    for mine, theirs in zip(path("topk:0.01", Counting(), drift), path("topk:0.01", REFERENCE, drift), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_rounded_and_read_as_everywhere(dtype):
    numbers = np.concatenate(
        [
            arrays_cases.random_floats(),
            arrays_cases.ties(dtype),
            arrays_cases.fp16_edges(),
            arrays_cases.specials("float32"),
            arrays_cases.nan_payloads(),
        ]
    )
    halves = np.empty(numbers.size, np.int16)
    kernels.to_halves(numbers, halves, 1.0, dtype == "bfloat16")
    back, expected = np.empty_like(numbers), REFERENCE.from_bits(REFERENCE.to_bits(numbers, dtype), dtype, "float32")
    kernels.mean_of_halves(halves[None], back, 1.0, dtype == "bfloat16")
    arrays_cases.same(back, expected)
    every = np.empty(2**16, np.float32)
    kernels.mean_of_halves(arrays_cases.ALL_BITS[None], every, 1.0, dtype == "bfloat16")
    arrays_cases.same(every, REFERENCE.from_bits(arrays_cases.ALL_BITS, dtype, "float32"))


def test_without_numba_array_operations_do_it_and_it_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "numba", None)
    kernels.available.cache_clear()
    steps, arrays = gradients(2, 100), Counting()
    with caplog.at_level(logging.WARNING, "hvdplus"):
        found = path("int8", arrays, steps)
    kernels.available.cache_clear()
    assert arrays.calls == 0
    assert [record.getMessage() for record in caplog.records] == [
        "hvdplus: numba is not installed, so codecs run on array operations, several times slower on CPUs; pip "
        "install numba."
    ]
    for mine, theirs in zip(found, path("int8", REFERENCE, steps), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("piece", [np.zeros(8, np.float32)[::2], np.zeros(4), np.zeros((2, 2), np.float32).T])
def test_what_loops_over_addresses_would_misread_is_refused(piece):
    with pytest.raises(ValueError, match="float32 without gaps"):
        kernels.table([np.zeros(3, np.float32), piece])


def test_halves_are_the_same_by_the_processor_and_by_their_bits():
    bits = np.arange(65536, dtype=np.uint16)
    found, expected = np.empty(bits.size, np.float32), np.empty(bits.size, np.float32)
    kernels._from_half(bits, found.view(np.uint32))
    kernels._from_half_by_bits(bits, expected.view(np.uint32))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found, bits.view(np.float16).astype(np.float32))
    generator = np.random.default_rng(0)
    numbers = np.concatenate([generator.integers(0, 2**32, 10**6, np.uint32).view(np.float32), expected])
    near, near_by_bits = np.empty(numbers.size, np.int16), np.empty(numbers.size, np.int16)
    kernels._to_half(numbers.view(np.uint32), numbers, near)
    kernels._to_half_by_bits(numbers.view(np.uint32), numbers, near_by_bits)
    np.testing.assert_array_equal(near.view(np.float16), near_by_bits.view(np.float16))
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(near.view(np.float16), numbers.astype(np.float16))


@pytest.mark.parametrize("told", [{"CPU_NAME": "generic"}, {"CPU_FEATURES": "+sse2"}])
def test_numba_that_compiles_for_another_processor_is_not_asked_for_what_this_one_has(monkeypatch, told):
    for name, value in told.items():
        monkeypatch.setattr(kernels.numba.config, name, value)
    assert not kernels._converts()
