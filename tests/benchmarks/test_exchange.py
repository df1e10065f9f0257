"""The exchange benchmark: what it adds up and judges, and that it measures real exchanges."""

import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path

import contenders
import exchange
import exchange_report
import gradients
import numpy as np
import protocol
import pytest
import targets
from exchange_report import Rate, Trial
from hosts import HostsError, Loopback
from protocol import Measured

BENCHMARK = Path(exchange.__file__)


@pytest.mark.parametrize("name", ["contenders", "gradients", "targets"])
def test_examples_are_true(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed


def test_every_contender_has_a_group_and_every_target_has_contenders():
    assert all(contenders.group_of(name) for name in contenders.ALL)
    everyone = dict.fromkeys(contenders.ALL, 1.0)
    assert len(targets.verdicts(everyone, contenders.ALL)) == len(targets.TARGETS)


def test_a_name_outside_the_list_is_measured_and_a_wrong_one_refused():
    assert contenders.chosen("hvdplus/mpi4py/int8:block=64") == ["hvdplus/mpi4py/int8:block=64"]
    with pytest.raises(ValueError, match="contender is 'nobody/x'"):
        contenders.chosen("nobody/x")
    with pytest.raises(ValueError, match="names no contender"):
        contenders.chosen("nobody*")


def test_gradients_differ_by_step_and_rank_and_are_the_same_again():
    shapes = [(3, 5), (gradients.NOISE + 7,), ()]
    mine = gradients.Gradients(shapes, 0)
    first = mine.fresh(0)
    assert [one.shape for one in first] == shapes
    assert all(np.array_equal(a, b) for a, b in zip(first, gradients.Gradients(shapes, 0).fresh(0), strict=True))
    for other in (mine.fresh(1), gradients.Gradients(shapes, 1).fresh(0)):
        assert not np.array_equal(first[0], other[0])
    assert first[1].std() == pytest.approx(1.0, rel=0.01)


def test_a_step_takes_as_long_as_its_slowest_rank():
    trial = Trial()
    trial.add([Measured([0.1, 0.4], 800, [1.0]), Measured([0.3, 0.2], 1000, [1.0])])
    assert trial.rounds == [[0.3, 0.4]]
    assert trial.sent == [500]
    rate = Rate(1.0, payload=[0.8], trials={"a": trial})
    assert rate.medians() == {"a": pytest.approx(0.35)}
    assert rate.bound("a") == pytest.approx(500 * 8e-9 / 0.8)


def test_ranks_with_different_means_have_not_exchanged():
    trial = Trial()
    trial.add([Measured([0.1], 1, [1.0]), Measured([0.1], 1, [2.0])])
    assert "the ranks' means differ: [[1.0], [2.0]]" in trial.error
    assert Rate(1.0, [1.0], {"a": trial}).medians() == {}
    nothing = Trial()
    nothing.add([Measured([0.1], 1, gradients.fingerprint([np.zeros(9, np.float32)]))] * 2)
    assert "means are all zero" in nothing.error


def test_verdicts_compare_the_best_on_either_side():
    medians = {
        "hvdplus/gloo/onebit": 0.2,
        "hvdplus/mpi4py/onebit": 0.1,
        "horovod/gloo/fp16": 2.0,
        "horovod/mpi/fp16": 0.9,
    }
    (verdict,) = targets.verdicts(medians, list(medians))
    assert (verdict.ours, verdict.against) == ("hvdplus/mpi4py/onebit", "horovod/mpi/fp16")
    assert verdict.measured == pytest.approx(9.0)
    assert not verdict.reached
    del medians["hvdplus/gloo/onebit"], medians["hvdplus/mpi4py/onebit"]
    assert targets.verdicts(medians, list(medians)) == [], "nobody asked for it"
    (failed,) = targets.verdicts(medians, [*medians, "hvdplus/gloo/onebit"])
    assert (failed.ours, failed.measured, failed.reached) == ("hvdplus/gloo/onebit", 0.0, False)


@pytest.mark.parametrize("text", ["x", "0", "-1", ""])
def test_a_rate_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="a rate is a number above 0"):
        exchange.parse_rate(text)


def test_rates_are_read():
    assert [exchange.parse_rate(text) for text in ("0.1", "10", "none")] == [0.1, 10.0, None]


def test_the_loopback_has_no_rate_and_no_cable():
    loopback = Loopback(2)
    with pytest.raises(HostsError, match="gbit is 1"):
        loopback.shape(1.0)
    with pytest.raises(HostsError, match="not ours"):
        loopback.set_link(loopback[0], up=False)


def test_it_measures_exchanges_and_goes_on_after_one_that_fails(tmp_path):
    only = "hvdplus/mpi4py/exact ddp/gloo/fp16 hvdplus/mpi4py/nonsense hvdplus/mpi4py/onebit"
    options = ["--quick", "--work", "tiny", "--gbit", "1", "--only", only, "--out", str(tmp_path)]
    line = [sys.executable, str(BENCHMARK), *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "codec 'nonsense' is unknown" in done.stdout
    found = json.loads((tmp_path / "exchange-tiny-2hosts.json").read_text())
    trials = found["rates"][0]["trials"]
    assert {name for name, trial in trials.items() if trial["rounds"]} == set(only.split()) - {
        "hvdplus/mpi4py/nonsense"
    }
    assert all(len(steps) == 2 for trial in trials.values() for steps in trial["rounds"])
    size = 4 * gradients.count(gradients.tiny())
    assert trials["hvdplus/mpi4py/exact"]["sent"][0] > size  # headers and all
    assert 0 < trials["hvdplus/mpi4py/onebit"]["sent"][0] < size / 2
    assert list(tmp_path.glob("*.png"))
    page = (tmp_path / "exchange-tiny-2hosts.txt").read_text()
    assert "hvdplus/mpi4py/onebit" in page
    assert str(found["machine"]["cpu"]) in page


def test_memory_is_judged_by_multiples_of_the_gradients():
    table = exchange_report.memories([exchange_report.Memory("hvdplus/gloo/onebit", 2, 4 * 2**20, 2**20, 2**20)])
    assert [next(iter(column.cells)) for column in table.columns][2:] == ["4", "1", "3.00", "[red]no[/]"]


class Recorded:
    """A contender that writes down what it is asked."""

    def __init__(self):
        self.calls = []

    def prepare(self, step):
        self.calls.append(step)

    def exchange(self):
        self.calls.append("exchange")

    def sample(self):
        return [float(len(self.calls))]

    def counted(self):
        return {}


@pytest.mark.parametrize(("seconds", "steps"), [(60.0, [5, 6, 7, 8]), (0.0, [5, 6, 7])])
def test_a_turn_ends_with_an_exchange_even_when_its_time_is_up(monkeypatch, seconds, steps):
    monkeypatch.setenv(protocol.INTERFACE, "lo")
    contender = Recorded()
    turn = protocol.Turn("x/y/z", "tiny", warmup=2, steps=2, seconds=seconds, first=5)
    found = protocol.measure(turn, lambda name, work: contender, lambda go: go)
    assert contender.calls == [call for step in steps for call in (step, "exchange")]
    assert len(found.seconds) == len(steps) - 2
    assert found.sample == [2.0 * len(steps)]
    assert found.peak_rss > 0


def test_memory_is_read_before_means_are_looked_at(monkeypatch):
    monkeypatch.setenv(protocol.INTERFACE, "lo")
    order, contender = [], Recorded()
    monkeypatch.setattr(protocol, "peak_rss", lambda: order.append("peak") or 1)
    monkeypatch.setattr(contender, "sample", lambda: order.append("sample") or [1.0])
    turn = protocol.Turn("x/y/z", "tiny", warmup=1, steps=1, seconds=1.0, first=0)
    protocol.measure(turn, lambda name, work: contender, lambda go: go)
    assert order == ["peak", "sample"]
