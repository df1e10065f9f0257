"""Tests of the comparison between ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdplus import ExchangeError, Strategy
from hvdplus.agreement import agree, describe, first_difference
from hvdplus.collectives import AllGather
from hvdplus.plan import Parameter, plan
from hvdplus.testing import Wire

items = st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=4)


def compare(everyone, hint=""):
    """Let ranks agree over a wire; return every rank's message (None where all is well) and the number of gathers."""

    def program(collectives):
        def gather(payload):
            padded = np.zeros(1000, np.uint8)
            padded[: len(payload)] = np.frombuffer(payload, np.uint8)
            rows = collectives.start(AllGather(padded), "gather").result()
            return [
                row[: len(payload)].tobytes() if len(payload) == 32 else row.tobytes().rstrip(b"\0") for row in rows
            ]

        try:
            agree(everyone[collectives.rank], gather, hint)
        except ExchangeError as error:
            return str(error)
        return None

    wire = Wire(len(everyone))
    return wire.run(program), len(wire.requests)


def test_one_gather_where_all_agree():
    assert compare([[("codec", "a"), ("é", "ü")]] * 3) == ([None] * 3, 1)


def test_the_first_difference_is_named_with_its_ranks_on_every_rank():
    same, four, two = ("codec", "fp16"), ("accumulate", "4"), ("accumulate", "2")
    messages, gathers = compare([[same, four, two], [same, two, four]] * 2, hint="give every rank the same strategy")
    assert gathers == 2
    assert (
        messages
        == [
            "the ranks disagree: ranks 0, 2 have accumulate 4, but ranks 1, 3 have accumulate 2; "
            "give every rank the same strategy."
        ]
        * 4
    )


def test_a_rank_that_has_less_is_named():
    a, b = ("parameter 0", "w"), ("parameter 1", "b")
    assert first_difference([[a, b], [a]]) == "rank 0 has parameter 1 b, but rank 1 has nothing more"


@given(st.lists(items, min_size=1, max_size=4))
def test_a_difference_is_found_where_there_is_one(everyone):
    assert (first_difference(everyone) == "nothing differs") == all(mine == everyone[0] for mine in everyone)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("codec", {"strategy": Strategy("bf16")}),
        ("accumulate", {"strategy": Strategy(accumulate=2)}),
        ("overrides", {"strategy": Strategy(overrides={"a": "fp16"})}),
        ("optimizer", {"owner": "Adam"}),
        ("micro-batches", {"sums": True}),
        ("parameter 0", {"parameters": [Parameter("other", (2,), "float32")]}),
        ("parameter 0", {"parameters": [Parameter("w", (3,), "float32")]}),
        ("parameter 0", {"parameters": [Parameter("w", (2,), "float16")]}),
        ("parameter 0", {"parameters": [Parameter("w", (2,), "float32", "cuda#0")]}),
        ("parameter 1", {"parameters": [Parameter("w", (2,), "float32"), Parameter("b", (2,), "float32")]}),
    ],
)
def test_whatever_ranks_must_have_in_common_is_compared(key, change):
    def described(parameters=None, strategy=None, owner="SGD", sums=False):
        strategy = strategy or Strategy()
        parameters = parameters or [Parameter("w", (2,), "float32")]
        return describe(plan(parameters, strategy), strategy, owner, sums)

    assert first_difference([described(), described()]) == "nothing differs"
    assert key in first_difference([described(), described(**change)])


def test_the_order_of_overrides_is_compared_because_it_decides():
    one, other = Strategy(overrides={"a*": "fp16", "*b": "bf16"}), Strategy(overrides={"*b": "bf16", "a*": "fp16"})
    described = [describe(plan([], strategy), strategy, "SGD", False) for strategy in (one, other)]
    assert "overrides" in first_difference(described)
