"""Tests of the strategy: validation, its grammar, and the ways it travels."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdplus import Strategy, StrategyError, codecs
from hvdplus.codecs import registry

SPECS = ["exact", "fp16", "bf16"]
GLOBS = st.text("abc.*?[]_0", min_size=1, max_size=8).filter(lambda glob: glob.strip())

strategies = st.builds(
    Strategy,
    codec=st.sampled_from(SPECS),
    feedback=st.sampled_from([None, True, False]),
    accumulate=st.integers(1, 64),
    op=st.sampled_from(["mean", "sum"]),
    warmup_steps=st.integers(0, 10_000),
    min_compress=st.integers(0, 10_000),
    bucket_bytes=st.integers(1024, 2**31),
    overrides=st.dictionaries(GLOBS, st.sampled_from(SPECS), max_size=3),
)


def test_defaults():
    assert Strategy().to_dict() == {
        "codec": "exact",
        "feedback": None,
        "accumulate": 1,
        "op": "mean",
        "warmup_steps": 0,
        "min_compress": 1024,
        "bucket_bytes": 25 * 2**20,
        "overrides": {},
    }


REFUSED = {
    "accumulate 0": ({"accumulate": 0}, "accumulate=0 must be a whole number of at least 1."),
    "accumulate text": ({"accumulate": "4"}, "accumulate='4' must be a whole number of at least 1."),
    "accumulate fraction": ({"accumulate": 2.0}, "accumulate=2.0 must be"),
    "accumulate bool": ({"accumulate": True}, "accumulate=True must be"),
    "warmup_steps": ({"warmup_steps": -1}, "warmup_steps=-1 must be a whole number of at least 0."),
    "min_compress": ({"min_compress": -1}, "min_compress=-1 must be a whole number of at least 0."),
    "bucket_bytes": ({"bucket_bytes": 1023}, "bucket_bytes=1023 must be a whole number of at least 1024."),
    "op": ({"op": "average"}, "op='average' must be one of 'mean', 'sum'."),
    "feedback text": ({"feedback": "yes"}, "feedback='yes' must be one of None, True, False."),
    "feedback number": ({"feedback": 1}, "feedback=1 must be one of"),
    "codec type": ({"codec": 16}, "codec=16 must be a codec spec"),
    "codec none": ({"codec": None}, "codec=None must be a codec spec"),
    "codec": ({"codec": "fp61"}, "codec 'fp61' is unknown"),
    "codec empty": ({"codec": ""}, "codec '' is unknown"),
    "codec argument": ({"codec": "exact:3"}, "codec spec 'exact:3' does not fit codec 'exact'"),
    "codec option": ({"codec": "fp16:loud=true"}, "codec spec 'fp16:loud=true' does not fit codec 'fp16'"),
    "block": ({"codec": "int8:0"}, "block=0 must be a whole number of at least 1."),
    "block word": ({"codec": "int8:block=large"}, "block='large' must be a whole number of at least 1."),
    "block odd": ({"codec": "int4:block=33"}, "block=33 must be a whole number of at least 2 and a multiple of 2"),
    "option or field": ({"codec": "fp16:acumulate=4"}, "; fp16 takes nothing, and the fields of a strategy are codec,"),
    "what it takes": ({"codec": "topk"}, "; topk takes ratio."),
    "override's codec": ({"overrides": {"*.bias": "int8:block=0"}}, "overrides['*.bias']: block=0 must be a whole"),
    "averages": ({"codec": "onebit:averages=onebit"}, "averages='onebit' must be 'ternary' or 'int4' or 'int8'."),
    "averages in no finer": ({"codec": "int8:averages=int4"}, "averages='int4' must be left out, since no codec is"),
    "block bits": ({"codec": "onebit:12"}, "block=12 must be a whole number of at least 8 and a multiple of 8"),
    "rounding": ({"codec": "int4:rounding=up"}, "rounding='up' must be 'nearest' or 'stochastic'."),
    "rounding of signs": ({"codec": "onebit:rounding=nearest"}, "does not fit codec 'onebit'"),
    "ratio 0": ({"codec": "topk:0"}, "ratio=0 must be above 0 and at most 1"),
    "ratio 2": ({"codec": "randomk:1.5"}, "ratio=1.5 must be above 0 and at most 1"),
    "ratio nan": ({"codec": "topk:nan"}, "ratio=nan must be above 0 and at most 1"),
    "ratio word": ({"codec": "topk:much"}, "ratio='much' must be above 0 and at most 1"),
    "ratio missing": ({"codec": "topk"}, "codec spec 'topk' does not fit codec 'topk'"),
    "rank 0": ({"codec": "powersgd:0"}, "rank=0 must be a whole number of at least 1"),
    "rank 1.5": ({"codec": "powersgd:1.5"}, "rank=1.5 must be a whole number of at least 1"),
    "override": ({"overrides": {"*.bias": "fp61"}}, "codec 'fp61' is unknown"),
    "override type": ({"overrides": {"*.bias": 3}}, "overrides['*.bias']=3 must be a codec spec"),
    "overrides type": ({"overrides": ["*"]}, "overrides=['*'] must map parameter-name globs to codec specs."),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(fields, message):
    with pytest.raises(StrategyError) as caught:
        Strategy(**fields)
    assert message in str(caught.value)
    with pytest.raises(StrategyError):
        Strategy.from_dict(fields)
    with pytest.raises(StrategyError):
        Strategy.of(None, **fields)


def test_an_unknown_codec_suggests_the_nearest_and_lists_all():
    with pytest.raises(StrategyError, match=r"did you mean 'fp16'\?") as caught:
        Strategy("f16")
    assert all(name in str(caught.value) for name in codecs.known())
    with pytest.raises(StrategyError, match=r"known are [\w, ]+\.$"):
        Strategy("zzz")


def test_it_cannot_be_changed():
    strategy = Strategy(overrides={"a": "fp16"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.accumulate = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        strategy.overrides["b"] = "fp16"  # type: ignore[index]


def test_it_does_not_follow_the_dict_it_was_made_of():
    given = {"a": "fp16"}
    strategy = Strategy(overrides=given)
    given["b"] = "bf16"
    assert dict(strategy.overrides) == {"a": "fp16"}
    strategy.to_dict()["overrides"]["b"] = "bf16"
    assert dict(strategy.overrides) == {"a": "fp16"}


@given(strategies)
def test_it_survives_every_way_of_travelling(strategy):
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert copy.deepcopy(strategy) == copy.copy(strategy) == strategy
    assert Strategy.from_dict(strategy.to_dict()) == strategy
    assert Strategy.from_dict(json.loads(json.dumps(strategy.to_dict()))) == strategy
    assert dataclasses.replace(strategy) == strategy
    assert hash(copy.deepcopy(strategy)) == hash(strategy)
    assert list(copy.deepcopy(strategy).overrides.items()) == list(strategy.overrides.items())  # their order decides


def as_text(strategy: Strategy) -> str:
    fields = strategy.to_dict()
    overrides = ";".join(f"{glob}={spec}" for glob, spec in fields.pop("overrides").items())
    parts = [fields.pop("codec"), *(f"{key}={value}" for key, value in fields.items())]
    return ",".join(parts + ([f"overrides={overrides}"] if overrides else []))


@given(strategies)
def test_its_text_says_the_same(strategy):
    assert Strategy.parse(as_text(strategy)) == strategy
    assert Strategy.from_env({"HVDPLUS_STRATEGY": as_text(strategy)}) == strategy
    assert Strategy.of(as_text(strategy)) == Strategy.of(strategy) == Strategy.of(strategy.to_dict()) == strategy


PARSED = {
    "": Strategy(),
    "fp16": Strategy("fp16"),
    " fp16 , accumulate = 4 ": Strategy("fp16", accumulate=4),
    "accumulate=4": Strategy(accumulate=4),
    "accumulate=4,fp16": Strategy("fp16", accumulate=4),
    "codec=bf16,op=sum": Strategy("bf16", op="sum"),
    "fp16,feedback=TRUE": Strategy("fp16", feedback=True),
    "fp16,feedback=none": Strategy("fp16"),
    "fp16,": Strategy("fp16"),
    "overrides=*.bias=exact;head.*=fp16": Strategy(overrides={"*.bias": "exact", "head.*": "fp16"}),
}


@pytest.mark.parametrize(("text", "strategy"), PARSED.items(), ids=PARSED)
def test_parse(text, strategy):
    assert Strategy.parse(text) == strategy


REFUSED_TEXTS = {
    "fp16,bf16": "'fp16,bf16' names more than one codec",
    "codec=fp16,bf16": "names more than one codec",
    "fp16,acumulate=4": "does not fit codec 'fp16'",
    "accumulate=four": "accumulate='four' must be a whole number",
    "accumulate=": "accumulate='' must be a whole number",
    "accumulate=none": "accumulate=None must be a whole number",
    "feedback=maybe": "feedback='maybe' must be one of",
    "op=avg": "op='avg' must be one of",
    "overrides=abc": "codec '' is unknown",
}


@pytest.mark.parametrize(("text", "message"), REFUSED_TEXTS.items(), ids=REFUSED_TEXTS)
def test_parse_refuses(text, message):
    with pytest.raises(StrategyError) as caught:
        Strategy.parse(text)
    assert message in str(caught.value)


def test_parse_refuses_what_is_no_text():
    with pytest.raises(StrategyError, match=r"strategy=3 must be a Strategy or a text"):
        Strategy.of(3)  # type: ignore[arg-type]


@given(st.text(max_size=30))
def test_any_text_is_a_strategy_or_a_strategy_error(text):
    with contextlib.suppress(StrategyError):
        assert isinstance(Strategy.parse(text), Strategy)


def test_unknown_fields_are_named_with_what_there_is():
    for make in (lambda: Strategy.of("fp16", acumulate=4), lambda: Strategy.from_dict({"acumulate": 4})):
        with pytest.raises(StrategyError, match=r"'acumulate' is no field of a strategy; the fields are codec, .*"):
            make()


def test_keywords_come_on_top(monkeypatch):
    assert Strategy.of("fp16,accumulate=2", accumulate=4, op="sum") == Strategy("fp16", accumulate=4, op="sum")
    monkeypatch.setenv("HVDPLUS_STRATEGY", "bf16,accumulate=3")
    assert Strategy.of(None, accumulate=2) == Strategy("bf16", accumulate=2)
    assert Strategy.from_env({}) == Strategy()


def test_options_of_a_codec_survive_the_commas(monkeypatch):
    made = []

    class Fake:
        def __init__(self, *arguments, **options):
            made.append((arguments, options))

    monkeypatch.setitem(registry._MAKERS, "fake", Fake)
    strategy = Strategy.parse("fake:0.01,block=64,accumulate=4,loud=true,word=x")
    assert strategy.codec == "fake:0.01,block=64,loud=true,word=x"
    assert strategy.accumulate == 4
    assert made[-1] == ((0.01,), {"block": 64, "loud": True, "word": "x"})
    assert Strategy.parse("fake,block=64").codec == "fake:block=64"
    assert made[-1] == ((), {"block": 64})
    assert Strategy.parse("codec=fake:1,block=2").codec == "fake:1,block=2"


@pytest.mark.parametrize("name", ["", "a-b", "a:b", "a,b", "1a", "a b"])
def test_a_codec_cannot_have_a_name_that_no_spec_can_hold(name):
    with pytest.raises(StrategyError, match="is not an identifier"):
        codecs.register(name)


def test_a_codec_name_is_taken_once():
    with pytest.raises(StrategyError, match=r"codec name 'fp16' is taken; choose another than .*bf16.*"):
        codecs.register("fp16")


def test_known_is_sorted():
    assert codecs.known() == sorted(codecs.known())
    assert {"exact", "fp16", "bf16"} <= set(codecs.known())
