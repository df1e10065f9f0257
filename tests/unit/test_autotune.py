"""What is predicted from what was measured, and which codec that chooses."""

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest

from hvdplus import autotune
from hvdplus.autotune import Cost, Survey
from hvdplus.cli import bench
from hvdplus.collectives import AllGather, LocalCollectives
from hvdplus.errors import StrategyError
from hvdplus.kernels import HostArrays
from hvdplus.session import Framework, Session
from hvdplus.strategy import Strategy
from hvdplus.watch import Watch
from hvdplus.world import World


def survey(**milliseconds):
    """Costs of one number, in ms, with the bytes of the codec."""
    sent = {"exact": 8, "fp16": 4, "int8": 2, "int4": 1, "ternary": 0.5, "onebit": 0.25}
    costs = tuple(Cost(codec, 0.0, ms / 1e3, 0.0, sent[codec]) for codec, ms in milliseconds.items())
    return Survey(2, 1e-4, 1e9, costs)


def test_a_step_costs_its_start_and_every_number():
    assert Cost("int8", 0.25, 1e-6, 0.0, 2.0).seconds(1_000_000) == pytest.approx(1.25)


def test_a_codec_pays_where_the_bytes_saved_take_longer_than_the_work():
    fp16 = Cost("fp16", 0, 0, own=1e-9, bytes_each=4)
    assert Cost("int8", 0, 0, own=5e-9, bytes_each=2).pays_below(fp16) == pytest.approx(8 * 2 / 4e-9)
    assert Cost("onebit", 0, 0, own=1e-9, bytes_each=0.25).pays_below(fp16) == math.inf
    assert Cost("exact", 0, 0, own=0, bytes_each=8).pays_below(fp16) == 0


ALL = ["exact", "fp16", "int8", "int4", "ternary", "onebit"]


@pytest.mark.parametrize(
    ("milliseconds", "allowed", "expected"),
    [
        ({"exact": 1, "fp16": 2, "int8": 3, "int4": 4}, ALL[:4], "exact"),
        ({"exact": 8, "fp16": 4, "int8": 2, "int4": 1}, ALL[:4], "int4"),
        ({"exact": 8, "fp16": 4, "int8": 2, "int4": 1.95}, ALL[:4], "int8"),  # no loss for so little
        ({"exact": 8, "fp16": 4, "int8": 4.1, "int4": 3.9}, ALL[:4], "fp16"),
        ({"exact": 8, "fp16": 4, "int8": 2, "int4": 1, "ternary": 0.6, "onebit": 0.3}, ALL, "onebit"),
        ({"exact": 8, "fp16": 4, "int8": 2, "int4": 1, "ternary": 0.6, "onebit": 0.3}, ALL[:5], "ternary"),
        ({"exact": 1, "fp16": 0.97}, ALL[:2], "exact"),
    ],
)
def test_the_fastest_is_taken_and_a_gentler_one_where_it_is_close(milliseconds, allowed, expected):
    found = survey(**milliseconds)
    assert found.fastest(10**6, allowed) == expected
    chosen, fp16 = found.cost(expected).seconds(10**6), found.cost("fp16").seconds(10**6)
    assert chosen <= fp16 / 0.95


def test_a_start_that_is_dear_counts_for_a_small_model_only():
    costs = (Cost("exact", 0.0, 8e-9, 0, 8), Cost("int8", 0.01, 2e-9, 0, 2))
    found = Survey(2, 1e-4, 1e9, costs)
    assert found.fastest(1000, ["exact", "int8"]) == "exact"
    assert found.fastest(10**8, ["exact", "int8"]) == "int8"


def alone():
    host = Framework("numpy", lambda x: x, lambda x: x, lambda c: c, lambda: None, lambda world: False, lambda: None)
    return Session(host, World(0, 1, 0, 1, "none"), "local", LocalCollectives(), Watch(0, 1))


def test_one_rank_needs_no_measurement():
    session = alone()
    assert autotune.chosen(Strategy("auto", accumulate=3), session, session.collectives, 10).to_dict() == (
        Strategy("exact", accumulate=3).to_dict()
    )


def test_another_codec_is_left_alone():
    session, strategy = alone(), Strategy("int8")
    assert autotune.chosen(strategy, session, session.collectives, 10) is strategy


def test_a_survey_measures_what_is_asked_and_can_be_kept(monkeypatch):
    monkeypatch.setattr(autotune, "_SIZES", ((1, 2),) * 3)
    turns = []
    found = autotune.survey(alone(), ["fp16", "onebit"], progress=turns.append)
    assert turns == ["fp16", "onebit"]
    assert [cost.codec for cost in found.costs] == turns
    assert all(cost.each > 0 and cost.own > 0 for cost in found.costs)
    kept = json.loads(found.to_json())
    assert kept["ranks"] == 1
    assert kept["costs"][1]["codec"] == "onebit"


def test_what_is_chosen_is_said_once_on_rank_0(monkeypatch, caplog):
    monkeypatch.setattr(autotune, "survey", lambda session, specs, among: survey(exact=8, fp16=4))

    class Two(LocalCollectives):
        size = 2

    with caplog.at_level(logging.INFO, "hvdplus"):
        strategy = autotune.chosen(Strategy("auto:fp16"), alone(), Two(), 1000)
    assert strategy.codec == "fp16"
    assert [record.getMessage() for record in caplog.records] == [
        "hvdplus: codec auto is fp16 on this link of 1 Gbit/s; ms a step predicted for 1000 gradients: exact 8e+03, "
        "fp16 4e+03."
    ]


def test_auto_chooses_for_a_whole_strategy_only():
    with pytest.raises(StrategyError, match="auto chooses for a whole strategy"):
        Strategy("int8", overrides={"head.*": "auto"})
    with pytest.raises(StrategyError, match="upto='topk' must be one of exact, fp16, int8, int4, ternary, onebit"):
        Strategy("auto:topk")


def test_the_echo_leaves_only_a_codecs_own_work():
    exchange = autotune._Exchange("int8", 1, autotune._Echo(2), alone())
    exchange()
    assert exchange.bytes_each == pytest.approx(1 + 2 / 512, abs=1e-3)
    assert isinstance(exchange._reducer._arrays, HostArrays)


def test_names_of_a_survey_are_counted_by_group():
    """A rank outside a process set makes no survey with it, and must still meet the others in its own."""
    names = []

    class Group(LocalCollectives):
        def __init__(self, label):
            self.label = label

        def start(self, request, name):
            names.append(name)
            return super().start(request, name)

    session = alone()

    def survey(label):
        ranks = autotune._Ranks(session, Group(label))
        ranks.ping()
        autotune._Exchange("exact", 1, ranks.lent, session)()

    survey("a set")
    first, names[:] = list(names), []
    survey("another")
    survey("another")
    assert first == [name.replace("another", "a set") for name in names[: len(first)]]
    assert len(set(names)) == len(names) == 2 * len(first)


def test_a_list_of_codecs_is_taken_apart_between_codecs_only():
    assert bench._listed("exact, int8:block=64,rounding=stochastic,topk:0.01,onebit:64,averages=int4,") == [
        "exact",
        "int8:block=64,rounding=stochastic",
        "topk:0.01",
        "onebit:64,averages=int4",
    ]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    for file in (tmp_path, tmp_path / "nowhere" / "x.json"):
        with pytest.raises(StrategyError, match=r"--json '.*' cannot be written; name a file in a folder that exists"):
            bench._check_folder(file)
    for good in (None, Path("-"), tmp_path / "x.json"):
        bench._check_folder(good)


def test_what_is_measured_as_a_codecs_own_work_reads_rows_as_an_engine_has_them():
    rows = autotune._Echo(3).start(AllGather(np.arange(4.0)), "x").result()
    assert rows.tolist() == [[0, 1, 2, 3]] * 3
    assert rows.flags.c_contiguous
