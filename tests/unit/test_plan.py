"""Tests of the plan: parameters and a strategy give buckets, without any rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdplus import Strategy, StrategyError
from hvdplus.plan import Bucket, Member, Parameter, codec_of, plan

DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
ITEM = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def models(draw):
    fields = st.tuples(shapes, st.sampled_from(DTYPES), st.sampled_from(["", "cpu#0", "cuda#0"]))
    kinds = st.sampled_from(["weight", "bias", "norm"])
    found = draw(st.lists(st.tuples(kinds, fields), max_size=12))
    return [Parameter(f"layer{i}.{kind}", *rest) for i, (kind, rest) in enumerate(found)]


strategies = st.builds(
    Strategy,
    codec=st.sampled_from(["exact", "fp16"]),
    min_compress=st.sampled_from([0, 1, 100, 1024]),
    bucket_bytes=st.sampled_from([1024, 4096, 25 * 2**20]),
    overrides=st.dictionaries(st.sampled_from(["*.bias", "layer1*", "*"]), st.sampled_from(["exact", "bf16"])),
)


def members(buckets):
    return [(bucket, member) for bucket in buckets for member in bucket.members]


@given(models(), strategies)
def test_every_parameter_that_is_not_empty_is_in_exactly_one_bucket(parameters, strategy):
    buckets = plan(parameters, strategy).buckets
    found = [member.index for _, member in members(buckets)]
    assert sorted(found) == [i for i, p in enumerate(parameters) if p.count > 0]


@given(models(), strategies)
def test_members_fill_their_bucket_without_gap_or_overlap(parameters, strategy):
    for bucket in plan(parameters, strategy).buckets:
        end = 0
        for member in bucket.members:
            assert (member.offset, member.count) == (end, parameters[member.index].count)
            assert member.name == parameters[member.index].name
            end += member.count
        assert bucket.flags_offset == end
        assert bucket.count == end + bucket.flags


@given(models(), strategies)
def test_a_bucket_has_one_codec_dtype_and_place(parameters, strategy):
    for bucket, member in members(plan(parameters, strategy).buckets):
        parameter = parameters[member.index]
        assert (codec_of(parameter, strategy), parameter.real_dtype, parameter.place) == (
            bucket.codec,
            bucket.dtype,
            bucket.place,
        )
        assert bucket.dtype in ITEM  # complex numbers travel as real ones


@given(models(), strategies)
def test_the_plan_is_the_same_on_every_rank(parameters, strategy):
    assert plan(list(parameters), strategy) == plan(tuple(parameters), strategy)
    assert [bucket.index for bucket in plan(parameters, strategy).buckets] == list(
        range(len(plan(parameters, strategy).buckets))
    )


@given(models(), strategies)
def test_buckets_are_in_the_order_in_which_backward_fills_them(parameters, strategy):
    buckets = [bucket for bucket in plan(parameters, strategy).buckets if bucket.members]
    filled_at = [min(member.index for member in bucket.members) for bucket in buckets]
    assert filled_at == sorted(filled_at, reverse=True)
    for bucket in buckets:
        indices = [member.index for member in bucket.members]
        assert indices == sorted(indices, reverse=True)


@given(models(), strategies)
def test_a_bucket_closes_as_soon_as_it_has_its_bytes(parameters, strategy):
    open_keys = set()
    for bucket in plan(parameters, strategy).buckets:
        if not bucket.members:
            continue
        item = ITEM[bucket.dtype]
        before_last = sum(member.count for member in bucket.members[:-1]) * item
        assert before_last < strategy.bucket_bytes
        key = bucket.codec, bucket.dtype, bucket.place
        if before_last + bucket.members[-1].count * item < strategy.bucket_bytes:
            assert key not in open_keys  # only one of a kind is left open
            open_keys.add(key)


@given(models(), strategies)
def test_flags_ride_in_the_last_bucket_if_it_is_exact_or_in_one_of_their_own(parameters, strategy):
    buckets = plan(parameters, strategy).buckets
    if not buckets:
        assert all(parameter.count == 0 for parameter in parameters)
        return
    assert [bucket.flags for bucket in buckets] == [0] * (len(buckets) - 1) + [len(parameters)]
    assert buckets[-1].codec == "exact"
    if not buckets[-1].members:
        assert buckets[-1].dtype == "float32"
        assert buckets[-2].codec != "exact"
        assert buckets[-1].place == buckets[-2].place


def test_notes_travel_behind_the_flags():
    parameters = [Parameter("a", (2,), "float32"), Parameter("b", (2000,), "float32")]
    assert plan(parameters, Strategy(), notes=3).buckets[-1].flags == 5
    assert plan(parameters, Strategy("fp16", overrides={"a": "fp16"}), notes=3).buckets[-1].count == 5


def test_no_parameters_no_buckets():
    assert plan([], Strategy()).buckets == ()
    assert plan([Parameter("empty", (0, 3), "float32")], Strategy()).buckets == ()


def test_a_scalar_has_one_element():
    assert plan([Parameter("scalar", (), "float32")], Strategy()).buckets[0].members == (Member(0, "scalar", 0, 1, ()),)


def test_a_complex_number_is_two_real_ones():
    (bucket,) = plan([Parameter("c", (3,), "complex64"), Parameter("r", (2,), "float32")], Strategy()).buckets
    assert bucket == Bucket(
        0, "exact", "float32", "", (Member(1, "r", 0, 2, (2,)), Member(0, "c", 2, 6, (3, 2))), flags=2
    )


def test_min_compress_counts_numbers_and_begins_at_its_value():
    strategy = Strategy("fp16", min_compress=10)
    assert codec_of(Parameter("a", (9,), "float32"), strategy) == "exact"
    assert codec_of(Parameter("a", (10,), "float32"), strategy) == "fp16"
    assert codec_of(Parameter("a", (5,), "complex64"), strategy) == "fp16"
    assert codec_of(Parameter("a", (), "float32"), Strategy("fp16", min_compress=0)) == "fp16"


def test_the_first_override_that_matches_decides_even_below_min_compress():
    strategy = Strategy("fp16", overrides={"head.bias": "exact", "head.*": "bf16", "*": "fp16"})
    assert codec_of(Parameter("head.bias", (5000,), "float32"), strategy) == "exact"
    assert codec_of(Parameter("head.weight", (2,), "float32"), strategy) == "bf16"
    assert codec_of(Parameter("body", (2,), "float32"), strategy) == "fp16"


def test_globs_see_case_and_the_whole_name():
    strategy = Strategy("fp16", min_compress=0, overrides={"Head": "bf16", "layer[0-3].w": "exact"})
    assert codec_of(Parameter("head", (2,), "float32"), strategy) == "fp16"
    assert codec_of(Parameter("Head.w", (2,), "float32"), strategy) == "fp16"
    assert codec_of(Parameter("layer2.w", (2,), "float32"), strategy) == "exact"
    assert codec_of(Parameter("layer4.w", (2,), "float32"), strategy) == "fp16"


def test_bucket_bytes_cuts():
    parameters = [Parameter(f"p{i}", (128,), "float32") for i in range(5)]  # 512 bytes each
    buckets = plan(parameters, Strategy(bucket_bytes=1024)).buckets
    assert [[member.index for member in bucket.members] for bucket in buckets] == [[4, 3], [2, 1], [0]]


def test_a_large_parameter_is_not_cut():
    (bucket,) = plan([Parameter("large", (10_000,), "float32")], Strategy(bucket_bytes=1024)).buckets
    assert bucket.count == 10_001


def test_labels_say_what_is_in_the_bucket():
    parameters = [Parameter(name, (2000,), "float32") for name in ("a", "b", "c")]
    first, flags = plan(parameters, Strategy("fp16")).buckets
    assert first.label == "bucket 0 (c ... a)"
    assert flags.label == "bucket 1 (usage flags)"
    assert plan(parameters[:1], Strategy()).buckets[0].label == "bucket 0 (a)"


def test_a_parameter_reads_well():
    assert str(Parameter("w", (2, 3), "float32")) == "w (2, 3) float32 on cpu"
    assert str(Parameter("w", (2, 3), "float16", "cuda#0", (1, 2))) == "w (2, 3) float16 on cuda#0 with strides (1, 2)"


def test_a_codec_of_matrices_takes_matrices_and_knows_their_shapes():
    parameters = [
        Parameter("conv", (64, 32, 3, 3), "float32"),
        Parameter("bias", (4096,), "float32"),
        Parameter("linear", (64, 128), "float32"),
        Parameter("thin", (2000, 4), "float32"),  # of rank 4 at most
    ]
    exact, low, _ = plan(parameters, Strategy("powersgd:4")).buckets
    assert (low.codec, exact.codec) == ("powersgd:4", "exact")
    assert [(m.name, m.shape) for m in low.members] == [("linear", (64, 128)), ("conv", (64, 32, 3, 3))]
    assert [m.name for m in exact.members] == ["thin", "bias"]
    assert codec_of(parameters[2], Strategy(overrides={"linear": "powersgd:100"})) == "exact"


def test_a_shape_is_that_in_memory():
    conv, c = (64, 32, 3, 3), (32, 64)
    assert Parameter("contiguous", conv, "float32", "", (288, 9, 3, 1)).in_memory == conv
    assert Parameter("channels last", conv, "float32", "", (288, 1, 96, 32)).in_memory == (64, 3, 3, 32)
    assert Parameter("transposed", c, "float32", "", (1, 32)).in_memory == (64, 32)
    assert Parameter("unknown", c, "float32").in_memory == c
    assert Parameter("complex", c, "complex64").in_memory == (32, 64, 2)


@pytest.mark.parametrize(
    ("spec", "shapes", "says"),
    [
        (
            "powersgd:512",
            [(64, 30), (128, 64)],
            "codec 'powersgd:512' can take none of these parameters, not even the largest, 'p1' of shape (128, 64): "
            "its rank is 512 and must be at most 42; choose another codec.",
        ),
        (
            "powersgd:1",
            [(4096,)],
            "codec 'powersgd:1' can take none of these parameters, not even the largest, 'p0' of shape (4096,): it "
            "is no matrix; choose another codec.",
        ),
    ],
)
def test_a_codec_that_can_take_nothing_is_refused(spec, shapes, says):
    parameters = [Parameter(f"p{i}", shape, "float32") for i, shape in enumerate(shapes)]
    with pytest.raises(StrategyError) as caught:
        plan(parameters, Strategy(spec))
    assert str(caught.value) == says


def test_a_codec_that_can_take_something_is_not_refused_nor_one_that_is_meant_for_nothing():
    matrix, vector = Parameter("m", (128, 64), "float32"), Parameter("v", (4096,), "float32")
    assert sorted(b.codec for b in plan([matrix, vector], Strategy("powersgd:4")).buckets)[-1] == "powersgd:4"
    assert plan([vector], Strategy("powersgd:4", overrides={"v": "int8"})).buckets[0].codec == "int8"
    assert plan([Parameter("small", (10,), "float32")], Strategy("powersgd:4")).buckets[0].codec == "exact"
