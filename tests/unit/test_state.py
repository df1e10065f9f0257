"""What codecs keep, by parameter: out of cells, into others, to another number of ranks; nothing is lost on the way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdplus import Strategy
from hvdplus.arrays import NumPyArrays
from hvdplus.plan import Parameter, plan
from hvdplus.reducer import Reducer
from hvdplus.state import IN_GRADIENTS, Piece, Saved, joined, misfit_line, norm, owed, put, rescaled, share, take
from hvdplus.stats import Stats
from hvdplus.testing import Wire
from hvdplus.watch import Watch

ARRAYS = NumPyArrays()
MODEL = [
    Parameter(name, shape, "float32") for name, shape in (("a", (70, 9)), ("b", (50,)), ("c", (400,)), ("d", (60, 8)))
]
COUNTS = {parameter.name: parameter.count for parameter in MODEL}


def planned(codec="int8", bucket_bytes=2**20, model=MODEL, **fields):
    return plan(model, Strategy(codec, min_compress=0, bucket_bytes=bucket_bytes, **fields))


def random_cells(mine, rank, size, server=True):
    """A residual and a server's chunk in each bucket; the filling behind the last chunk stays 0, as in a codec."""
    generator = np.random.default_rng([rank, len(mine.buckets)])
    cells = []
    for bucket in mine.buckets:
        if bucket.codec == "exact":
            cells.append({})
            continue
        chunk = -(-bucket.count // size) + 1
        part = generator.normal(size=chunk)
        part[max(0, bucket.count - rank * chunk) :] = 0
        cells.append({"residual": generator.normal(size=bucket.count)} | ({"server": part} if server else {}))
    return cells


def like(cells):
    return [{key: np.zeros_like(value) for key, value in named.items()} for named in cells]


def names_and_bytes(kept):
    return {(k, n): (p.begin, p.values.tobytes()) for k, pieces in kept.items() for n, p in pieces.items()}


def total(everyone, size):
    return {name: piece.values for name, piece in owed(everyone, size, COUNTS, ARRAYS).items()}


@given(size=st.integers(1, 5), bucket_bytes=st.sampled_from([1024, 2000, 2**20]))
def test_what_is_taken_fits_back_in(size, bucket_bytes):
    mine = planned(bucket_bytes=bucket_bytes)
    for rank in range(size):
        cells = random_cells(mine, rank, size)
        found = put(mine, like(cells), take(mine, cells, ARRAYS, rank), ARRAYS, rank, size)
        assert (found.waiting, found.misfits) == ({}, [])
        for named, again in zip(cells, found.cells, strict=True):
            assert {k: v.tobytes() for k, v in named.items()} == {k: v.tobytes() for k, v in again.items()}


@given(size=st.integers(2, 5), before=st.sampled_from([1024, 2000, 2**20]), after=st.sampled_from([1024, 2000, 2**20]),
       server=st.booleans())  # fmt: skip
def test_other_buckets_owe_the_same(size, before, after, server):
    old, new = planned(bucket_bytes=before), planned("onebit", bucket_bytes=after)
    taken, again = [], []
    for rank in range(size):
        taken.append(take(old, random_cells(old, rank, size), ARRAYS, rank))
        found = put(new, like(random_cells(new, rank, size, server)), taken[rank], ARRAYS, rank, size)
        assert (found.waiting, found.misfits) == ({}, [])
        again.append(take(new, found.cells, ARRAYS, rank))
    expected = total(taken, size)
    assert expected.keys() == COUNTS.keys()
    for name, values in total(again, size).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 3)])
def test_another_number_of_ranks_keeps_the_sum(before, now):
    mine = planned(bucket_bytes=2000)
    ranks = {r: take(mine, random_cells(mine, r, before), ARRAYS, r) for r in range(before)}
    shares = [share(Saved(before, ranks), r, now, COUNTS, ARRAYS) for r in range(now)]
    lines = [line for _, line in shares]
    assert f"{before} ranks" in lines[0] and f"loaded on {now}" in lines[0] and not any(lines[1:])
    kept = [kept for kept, _ in shares]
    expected = total(ranks.values(), before)
    for name, values in total(kept, now).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-6)
    assert all(names_and_bytes(one) == names_and_bytes(kept[0]) for one in kept)


def test_the_same_number_of_ranks_gets_its_own_back():
    mine = planned()
    ranks = {r: take(mine, random_cells(mine, r, 3), ARRAYS, r) for r in range(3)}
    for rank in range(3):
        kept, line = share(Saved(3, ranks), rank, 3, COUNTS, ARRAYS)
        assert names_and_bytes(kept) == names_and_bytes(ranks[rank])
        assert line == ""


@pytest.mark.parametrize("now", [4, 2])
def test_one_ranks_file_is_that_ranks(now):
    mine = planned()
    own = take(mine, random_cells(mine, 0, 4), ARRAYS, 0) | {"start": {"a": Piece(0, np.ones(3))}}
    shares = [share(Saved(4, {0: own}), rank, now, COUNTS, ARRAYS) for rank in range(now)]
    lines = [line for _, line in shares]
    line = lines[1 if now == 4 else 0]
    assert "rank 0 of 4 only" in line and "consolidate()" in line and lines.count("") == now - 1
    for name, values in total([shares[0][0]], now).items():
        np.testing.assert_allclose(values, total([own], 4)[name], rtol=1e-6)
    for kept, _ in shares:
        assert kept["start"]["a"].values.tolist() == [1, 1, 1], "it must be the same on all ranks"
    for kept, _ in shares[1:]:
        assert not any(kept.get(key) for key in IN_GRADIENTS)


def test_one_rank_alone_exchanges_nothing_so_it_keeps_nothing_and_says_so():
    ranks = {r: {"residual": {"b": Piece(0, np.full(50, float(r)))}} for r in range(3)}
    for have in (ranks, {0: ranks[0]}):
        kept, line = share(Saved(3, have), 0, 1, COUNTS, ARRAYS)
        assert (kept, line) == ({}, "hvdplus: what 3 ranks had not delivered is dropped: one rank exchanges nothing.")


def test_fewer_ranks_with_a_file_each_say_what_is_lost():
    lines = [
        share(Saved(4, {rank: {"residual": {"b": Piece(0, np.ones(50))}}}), rank, 2, COUNTS, ARRAYS)[1]
        for rank in range(2)
    ]
    assert "holds the residuals of rank 0 of 4 only, and what others had not delivered is lost" in lines[0]
    assert lines[1] == ""


def test_each_ranks_own_file_says_nothing():
    for rank in range(3):
        saved = Saved(3, {rank: {"residual": {"b": Piece(0, np.full(50, float(rank)))}}})
        kept, line = share(saved, rank, 3, COUNTS, ARRAYS)
        assert (kept["residual"]["b"].values[0], line) == (rank, "")


def test_nothing_kept_is_nothing_to_say():
    assert share(Saved(4, {0: {}}), 0, 2, COUNTS, ARRAYS) == ({}, "")
    assert share(Saved(2, {0: {}, 1: {}}), 1, 3, COUNTS, ARRAYS) == ({}, "")


def test_what_has_no_place_waits_or_does_not_fit():
    mine = planned(model=MODEL[:3], overrides={"c": "exact"})
    cells = random_cells(mine, 0, 2)
    numbers = {"a": np.ones(630), "b": np.ones(49), "c": np.ones(400), "d": np.ones(480)}
    kept = {"residual": {name: Piece(0, values) for name, values in numbers.items()}}
    found = put(mine, like(cells), kept, ARRAYS, 0, 2)
    assert found.waiting == {"residual": {"d": kept["residual"]["d"]}}
    assert found.misfits == ["b (residual)", "c (residual)"]
    assert sum(named["residual"].sum() for named in found.cells if named) == 630


def test_the_vectors_of_matrices_follow_them():
    one, other = planned("powersgd:2"), planned("powersgd:2", model=[MODEL[3], MODEL[0]], bucket_bytes=1024)
    widths = {"a": 2 * 9, "d": 2 * 8}
    bucket = next(b for b in one.buckets if b.codec != "exact")
    assert [m.name for m in bucket.members] == ["d", "a"]
    values = np.arange(float(sum(widths.values())))
    kept = take(one, [{"start": values} if b is bucket else {} for b in one.buckets], ARRAYS, 0)
    assert {name: piece.values.size for name, piece in kept["start"].items()} == widths
    cells = [{"start": np.zeros(sum(widths[m.name] for m in b.members))} if b.members else {} for b in other.buckets]
    found = put(other, cells, kept, ARRAYS, 0, 2)
    assert (found.waiting, found.misfits) == ({}, [])
    assert np.concatenate([named["start"] for named in found.cells if named]).tolist() == [
        *values[16:], *values[:16]
    ]  # fmt: skip
    narrower = [{key: value[: value.size // 2] for key, value in named.items()} for named in cells]
    assert put(other, narrower, kept, ARRAYS, 0, 2).misfits == ["d (start)", "a (start)"]


def test_a_cell_that_cannot_be_cut_belongs_to_the_whole_bucket():
    mine = planned()
    cells = [{"count": np.array([3.0])} if b.codec != "exact" else {} for b in mine.buckets]
    kept = take(mine, cells, ARRAYS, 1)
    assert put(mine, like(cells), kept, ARRAYS, 1, 2).cells == cells
    fewer = planned(model=MODEL[:3])
    found = put(fewer, [{"count": np.zeros(1)}, {}], kept, ARRAYS, 1, 2)
    assert (found.cells[0]["count"].tolist(), found.waiting, found.misfits) == ([0.0], kept, [])


def test_a_copy_is_taken_and_put():
    mine = planned()
    cells = random_cells(mine, 0, 1)
    kept = take(mine, cells, ARRAYS, 0)
    before = names_and_bytes(kept)
    found = put(mine, cells, kept, ARRAYS, 0, 1)
    for named in [*cells, *found.cells]:
        for value in named.values():
            value[:] = 5.0
    assert names_and_bytes(kept) == before


def test_only_what_is_in_gradients_is_rescaled():
    kept = {key: {"a": Piece(1, np.array([3.0]))} for key in ("residual", "server", "start")}
    found = rescaled(kept, 2.0, ARRAYS)
    assert {key: (p["a"].begin, p["a"].values.tolist()) for key, p in found.items()} == {
        "residual": (1, [6.0]), "server": (1, [6.0]), "start": (1, [3.0]),
    }  # fmt: skip
    assert rescaled(kept, 1.0, ARRAYS) is kept


def test_small_things():
    one, two = (
        {"residual": {"a": Piece(0, np.array([3.0]))}},
        {"residual": {"b": Piece(0, np.array([4.0]))}, "start": {}},
    )
    assert joined(one, two) == {"residual": {**one["residual"], **two["residual"]}, "start": {}}
    assert norm({}, ARRAYS) == 0
    assert misfit_line([str(i) for i in range(9)]).startswith(
        "hvdplus: dropped what codecs kept of 0, 1, 2, 3, 4 and 4 "
    )


@pytest.mark.parametrize("codec", ["int8", "onebit", "topk:0.1", "randomk:0.1", "powersgd:2"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_reducer_goes_on_from_what_another_kept(codec, size):
    strategy = Strategy(codec, min_compress=0, bucket_bytes=2000)
    wire = Wire(size)

    def make(collectives, steps=0):
        watch = Watch(collectives.rank, collectives.size)
        return Reducer(plan(MODEL, strategy), strategy, collectives, ARRAYS, watch, "0", Stats(steps=steps))

    def exchange(mine, rank, step):
        generator = np.random.default_rng([rank, step])
        for bucket in mine.plan.buckets:
            mine.start(generator.normal(size=bucket.count).astype("f"))
        means = [mean.tobytes() for mean in mine.finish()]
        mine.commit()
        return means

    def program(collectives):
        unbroken = make(collectives)
        for step in range(3):
            exchange(unbroken, collectives.rank, step)
        resumed = make(collectives, 3)
        assert resumed.keep(unbroken.kept()) == ({}, [])
        assert names_and_bytes(resumed.kept()) == names_and_bytes(unbroken.kept())
        for step in range(3, 6):
            assert exchange(resumed, collectives.rank, step) == exchange(unbroken, collectives.rank, step)
        assert resumed.kept()["residual"]
        resumed.keep({})
        assert not any(p.values.any() for pieces in resumed.kept().values() for p in pieces.values())
        return True

    assert wire.run(program) == [True] * size
