"""Tests of the test double: it serves what was asked for, and turns every would-be hang into a message."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hvdplus import ExchangeError
from hvdplus.codecs import Outcome
from hvdplus.collectives import AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter
from hvdplus.testing import Wire, lockstep


def ask(wire, make):
    """Return every rank's answer to ``make(rank)``."""
    return [a.tolist() for a in wire.run(lambda c: c.start(make(c.rank), "it").result())]


def test_all_reduce_scales_before_it_adds():
    wire = Wire(4)
    assert ask(wire, lambda r: AllReduce(np.array([40000.0, r], np.float16), 0.25)) == [[40000.0, 1.5]] * 4


def test_all_gather():
    assert ask(Wire(3), lambda r: AllGather(np.array([r, -r]))) == [[[0, 0], [1, -1], [2, -2]]] * 3


def test_all_to_all():
    answers = ask(Wire(3), lambda r: AllToAll(np.array([[10 * r], [10 * r + 1], [10 * r + 2]])))
    assert answers == [[[0], [10], [20]], [[1], [11], [21]], [[2], [12], [22]]]


def test_reduce_scatter():
    assert ask(Wire(2), lambda r: ReduceScatter(np.array([[1.0, r], [2.0, r]]), 2.0)) == [[4.0, 2.0], [8.0, 2.0]]


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast(root):
    assert ask(Wire(3), lambda r: Broadcast(np.array([r]), root)) == [[root]] * 3


def test_no_rank_sees_what_another_writes_into_its_answer():
    def program(collectives):
        answer = collectives.start(AllGather(np.array([1.0])), "a").result()
        answer[:] = collectives.rank
        collectives.start(AllGather(np.array([1.0])), "b").result()
        return answer.tolist()

    assert Wire(2).run(program) == [[[0.0], [0.0]], [[1.0], [1.0]]]


def test_a_value_given_up_is_written_into_as_some_engines_do():
    def program(collectives):
        value = np.array([1.0])
        collectives.start(AllReduce(value), "sum").result()
        return value.tolist()

    assert Wire(2).run(program) == [[2.0], [2.0]]


def test_bytes_are_counted_by_rank():
    wire = Wire(4)
    ask(wire, lambda r: AllReduce(np.zeros(100, np.float32)))
    ask(wire, lambda r: AllGather(np.zeros(100, np.float32)))
    assert wire.bytes_sent == [2 * 300 + 3 * 400] * 4
    assert wire.requests == ["AllReduce of float32 (100,)", "AllGather of float32 (100,)"]


class Asks:
    """A codec that makes ``requests(rank)``, one round each."""

    def __init__(self, rounds):
        self.rounds = rounds

    def exchange(self, x, site):
        yield from (request for request in self.rounds(site.rank, x))  # a list cannot be sent answers
        return Outcome(x)


DIFFERENCES = {
    "kind": (
        lambda r, x: [AllReduce(x) if r else AllGather(x)],
        "round 1: rank 0 asks for AllGather of float64 (3,), but rank 1 asks for AllReduce of float64 (3,).",
    ),
    "shape": (lambda r, x: [AllGather(x[r:])], "rank 0 asks for AllGather of float64 (3,), but rank 1 .* (2,)"),
    "dtype": (lambda r, x: [AllGather(x.astype(["f4", "f8"][r]))], "float32 .* but rank 1 .* float64"),
    "scale": (lambda r, x: [AllReduce(x, 1.0 / (r + 1))], "(3,), but rank 1 asks for .* times 0.5"),
    "root": (lambda r, x: [Broadcast(x, r)], "from rank 0, but rank 1 .* from rank 1"),
    "number": (
        lambda r, x: [[AllGather(x), AllGather(x)][: r + 1]],
        "but rank 1 asks for AllGather of float64 (3,) and AllGather of float64 (3,).",
    ),
    "one finishes early": (
        lambda r, x: [AllGather(x)] * (2 - r),
        "round 2: rank 0 asks for AllGather of float64 (3,), but rank 1 has finished.",
    ),
    "one does not begin": (lambda r, x: [AllGather(x)] * r, "round 1: rank 0 has finished, but rank 1 asks for"),
}


@pytest.mark.parametrize(("rounds", "message"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_lockstep_names_the_first_difference(rounds, message):
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ExchangeError, match=pattern):
        lockstep(Asks(rounds), [np.zeros(3), np.zeros(3)])


class NoGenerator:
    def exchange(self, x, site):
        return Outcome(x)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (NoGenerator(), "NoGenerator.exchange must be a generator"),
        (Asks(lambda r, x: [3]), "rank 0's codec yielded 3"),
        (Asks(lambda r, x: [[AllGather(x), None]]), "rank 0's codec yielded None"),
    ],
)
def test_lockstep_says_what_a_codec_must_be(codec, message):
    with pytest.raises(TypeError, match=message):
        lockstep(codec, [np.zeros(3)] * 2)


def test_lockstep_wants_an_outcome():
    class Forgets:
        def exchange(self, x, site):
            yield AllGather(x)

    with pytest.raises(TypeError, match="codec returned None; return an Outcome"):
        lockstep(Forgets(), [np.zeros(3)] * 2)


def test_lockstep_wants_one_input_a_rank():
    with pytest.raises(ValueError, match="3 inputs do not fit 2 sites"):
        lockstep("exact", [np.zeros(1)] * 3, sites=Wire(2).sites())


def test_lockstep_leaves_its_inputs_alone():
    inputs = [np.ones(3), np.zeros(3)]
    assert lockstep("exact", inputs)[1].mean.tolist() == [0.5] * 3
    assert [x.tolist() for x in inputs] == [[1.0] * 3, [0.0] * 3]


def test_sites_count_steps():
    sites = Wire(2).sites()
    for _ in range(3):
        lockstep("exact", [np.ones(1)] * 2, sites=sites)
    assert [site.step for site in sites] == [3, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllToAll(np.zeros((3, 1))), r"AllToAll of float64 \(3, 1\); its shape must be \(2, n\)"),
        (lambda: ReduceScatter(np.zeros(4)), r"its shape must be \(2, n\)"),
        (lambda: AllReduce(np.zeros(4, np.float16)), "this wire has no half precision"),
    ],
)
def test_what_no_engine_could_serve_is_refused(make, message):
    with pytest.raises(ExchangeError, match=message):
        ask(Wire(2, halves=False), lambda r: make())


def test_bits_of_halves_travel_everywhere():
    assert ask(Wire(2, halves=False), lambda r: AllGather(np.zeros(1, np.int16))) == [[[0], [0]]] * 2


def test_names_must_be_equal():
    with pytest.raises(ExchangeError, match=r"request 1: rank \d asks for .* named 'it\d', but rank \d"):
        Wire(2).run(lambda c: c.start(AllGather(np.zeros(1)), f"it{c.rank}").result())


def test_a_rank_that_ends_is_named_by_those_that_wait_for_it():
    def program(collectives):
        if collectives.rank == 0:
            collectives.start(AllGather(np.zeros(1)), "it").result()

    with pytest.raises(ExchangeError, match=r"rank 0 waits for AllGather .* named 'it', but rank 1 has ended"):
        Wire(2).run(program)


def test_the_cause_is_raised_and_not_what_follows_from_it():
    def program(collectives):
        if collectives.rank == 1:
            raise KeyError("mine")
        collectives.start(AllGather(np.zeros(1)), "it").result()

    with pytest.raises(KeyError, match="mine"):
        Wire(3).run(program)


def test_a_rank_that_does_not_end_is_named():
    gate = threading.Event()
    with pytest.raises(ExchangeError, match=r"rank 1 did not end within 0\.1 s"):
        Wire(2).run(lambda c: gate.wait(20) if c.rank else None, seconds=0.1)
    gate.set()
