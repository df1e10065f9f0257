"""The reducer over ranks in threads: order, counting, warm-up, feedback, and what a bad step leaves behind."""

from __future__ import annotations

import numpy as np
import pytest
from codec_laws import OURS, register_ours

from hvdplus import ExchangeError, Strategy
from hvdplus.arrays import NumPyArrays
from hvdplus.codecs import Outcome, registry
from hvdplus.collectives import AllReduce, LocalCollectives
from hvdplus.plan import Parameter, plan
from hvdplus.reducer import Reducer, run_alone, wire_bytes_dense
from hvdplus.stats import Stats
from hvdplus.testing import Wire
from hvdplus.watch import Watch

MODEL = [Parameter(f"layer{i}", (300,), "float32") for i in range(4)]  # 1200 bytes each: a bucket each
SMALL = {"min_compress": 0, "bucket_bytes": 1024}


@pytest.fixture(autouse=True, scope="module")
def _user_codec():
    register_ours()
    yield
    for name in OURS:
        del registry._MAKERS[name]


def make(collectives, strategy, model=MODEL):
    arrays, watch = NumPyArrays(), Watch(collectives.rank, collectives.size)
    return Reducer(plan(model, strategy), strategy, collectives, arrays, watch, "0", Stats())


def values(mine, rank, step, scale=1.0):
    """One array a bucket, other ones on every rank and in every step."""
    generator = np.random.default_rng([rank, step])
    return [(scale * generator.normal(size=b.count)).astype(b.dtype) for b in mine.plan.buckets]


def exchange(mine, buffers):
    for buffer in buffers:
        mine.start(buffer.copy())
    return mine.finish()


def run(size, strategy, steps=1, model=MODEL, halves=True, change=None, first=0):
    """Return every rank's means of the last step, its stats, and the wire."""
    wire = Wire(size, halves=halves)

    def program(collectives):
        mine, means = make(collectives, strategy, model), []
        mine.stats.steps = first
        for step in range(steps):
            buffers = values(mine, collectives.rank, step)
            if change:
                change(buffers, collectives.rank, step)
            means.append(exchange(mine, buffers))
            mine.commit()
        return means, mine.stats

    results = wire.run(program)
    return [means for means, _ in results], [stats for _, stats in results], wire


def expected(size, strategy, step=0, model=MODEL):
    mine = make(LocalCollectives(), strategy, model)
    ranks = [values(mine, rank, step) for rank in range(size)]
    return [np.mean([ranks[r][b].astype(np.float64) for r in range(size)], axis=0) for b in range(len(ranks[0]))]


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("codec", "error"), [("exact", 1e-6), ("fp16", 4e-3), ("bf16", 4e-2)])
def test_all_ranks_get_the_mean_of_every_bucket(codec, error, size, halves):
    strategy = Strategy(codec, **SMALL)
    means, _, _ = run(size, strategy, halves=halves)
    for found, mean in zip(means[0][0], expected(size, strategy), strict=True):
        np.testing.assert_allclose(found, mean, atol=error)
    for others in means[1:]:
        assert [m.tobytes() for m in others[0]] == [m.tobytes() for m in means[0][0]]


def test_op_sum_is_the_mean_times_the_ranks():
    mean, _, _ = run(3, Strategy("fp16", **SMALL))
    total, _, _ = run(3, Strategy("fp16", op="sum", **SMALL))
    for one, three in zip(mean[0][0], total[0][0], strict=True):
        np.testing.assert_array_equal(one * np.float32(3), three)


def test_mixed_dtypes_and_codecs():
    model = [
        Parameter("half", (40,), "float16"),
        Parameter("double", (7,), "float64"),
        Parameter("complex", (5,), "complex64"),
        Parameter("single", (301,), "float32"),
        Parameter("empty", (0,), "float32"),
    ]
    strategy = Strategy("bf16", min_compress=20, overrides={"s*": "fp16"})
    means, _, wire = run(2, strategy, model=model, halves=False)
    for found, mean in zip(means[0][0], expected(2, strategy, model=model), strict=True):
        np.testing.assert_allclose(found, mean, atol=4e-2)
    assert not any("float16" in what for what in wire.requests)


class Recorder:
    """Collectives that note when something is started and when it is awaited."""

    def __init__(self, inner, events):
        self.inner, self.events, self.rank, self.size = inner, events, inner.rank, inner.size

    def sums(self, value, dtype):
        return self.inner.sums(value, dtype)

    def start(self, request, name):
        self.events.append(("start", name))
        return Recorded(self.inner.start(request, name), self.events, name)


class Recorded:
    def __init__(self, inner, events, name):
        self.inner, self.events, self.name = inner, events, name

    def done(self):
        return self.inner.done()

    def result(self):
        self.events.append(("await", self.name))
        return self.inner.result()


def events_of(strategy):
    def program(collectives):
        events = []
        mine = make(Recorder(collectives, events), strategy)
        exchange(mine, values(mine, collectives.rank, 0))
        return events

    return Wire(3, halves=False).run(program)[0]  # two ranks would need one round only


def test_requests_are_in_plan_order_round_by_round():
    names = [name for kind, name in events_of(Strategy("bf16", **SMALL)) if kind == "start"]
    # Four buckets of two rounds, and the flags, which are exact, of one.
    first, second = [f"hvdplus.0.{b}.0.0" for b in range(5)], [f"hvdplus.0.{b}.1.0" for b in range(4)]
    assert names == first + second


def test_a_second_round_is_started_for_all_before_any_is_awaited():
    events = events_of(Strategy("bf16", **SMALL))
    second = [name for kind, name in events if kind == "start" and name.endswith(".1.0")]
    first_awaited = events.index(("await", second[0]))
    assert all(events.index(("start", name)) < first_awaited for name in second)
    awaited = [name for kind, name in events if kind == "await"]
    assert awaited == sorted(awaited, key=lambda name: (name.split(".")[3], name))


def test_every_first_round_flies_before_any_is_awaited():
    events = events_of(Strategy("fp16", **SMALL))
    kinds = [kind for kind, name in events if name.endswith(".0.0")]
    assert kinds == ["start"] * 5 + ["await"] * 5


def test_names_are_unique_in_flight():
    _, _, wire = run(2, Strategy("bf16", **SMALL))
    assert len(set(wire.names)) == len(wire.names)


def test_warmup_steps_are_exact_and_begin_no_state():
    means, _, wire = run(2, Strategy("fp16", feedback=True, warmup_steps=2, **SMALL), steps=3)
    for step in range(2):
        for found, mean in zip(means[0][step], expected(2, Strategy("fp16", **SMALL), step), strict=True):
            np.testing.assert_allclose(found, mean, atol=1e-6)
    fresh, _, _ = run(2, Strategy("fp16", **SMALL), steps=3)
    for late, plain in zip(means[0][2][:-1], fresh[0][2][:-1], strict=True):
        assert late.tobytes() == plain.tobytes()  # the residual was still zero
    wide = ["float16" in what for what in wire.requests]
    assert wide == [False] * 10 + [True] * 4 + [False]


@pytest.mark.parametrize("feedback", [None, False, True])
def test_feedback_as_the_strategy_says(feedback):
    """A number below a half's last place is delivered in the long run with feedback, and lost without."""

    def change(buffers, rank, step):
        for buffer in buffers:
            buffer[:] = 1.0 + 2**-13

    means, _, _ = run(2, Strategy("fp16", feedback=feedback, **SMALL), steps=16, change=change)
    total = sum(step[0].astype(np.float64) for step in means[0])
    assert (total > 16).all() == (feedback is True)


def test_a_lossy_codec_has_feedback_unless_told_otherwise():
    def sum_of(feedback):
        means, _, _ = run(2, Strategy("signs", feedback=feedback, **SMALL), steps=200, change=fixed)
        return np.mean([step[0] for step in means[0]], axis=0)

    def fixed(buffers, rank, step):
        for buffer in buffers:
            buffer[:] = np.linspace(0.1, 1, buffer.size)

    wanted = np.linspace(0.1, 1, 300)
    assert np.abs(sum_of(None) - wanted).max() < 0.1
    assert np.abs(sum_of(True) - wanted).max() < 0.1
    assert np.abs(sum_of(False) - wanted).max() > 0.4


def test_exact_never_has_feedback():
    mine = make(LocalCollectives(), Strategy(feedback=True, **SMALL))
    exchange(mine, values(mine, 0, 0))
    assert not any(site.cells for site in mine._sites)


def bad_bucket(buffers, rank, step):
    if step == 1 and rank == 1:
        buffers[2][17] = np.nan


@pytest.mark.parametrize("codec", ["fp16", "bf16", "signs"])
@pytest.mark.parametrize("commit", [True, False])
def test_a_step_with_one_bad_bucket_leaves_no_trace_in_any(codec, commit):
    """The third step after a bad second one is bit by bit what it is after none."""
    strategy = Strategy(codec, feedback=True, **SMALL)

    def program(skip):
        def rank(collectives):
            mine = make(collectives, strategy)
            for step in (0, 1, 2):
                if step == 1 and skip:
                    continue
                buffers = values(mine, collectives.rank, step)
                bad_bucket(buffers, collectives.rank, step)
                means = exchange(mine, buffers)
                if step == 1:
                    assert not np.isfinite(means[2]).all()
                    assert np.isfinite(means[0]).all()
                if step != 1 or commit:
                    mine.commit()
            return [mean.tobytes() for mean in means]

        return Wire(2).run(rank)

    assert program(skip=False) == program(skip=True)


def test_rollback_undoes_a_step_and_commit_keeps_it():
    strategy = Strategy("fp16", feedback=True, **SMALL)

    def program(second):
        def rank(collectives):
            mine = make(collectives, strategy)
            for step in (0, 1, 2):
                if step == 1 and second == "none":
                    continue
                means = exchange(mine, values(mine, collectives.rank, step))
                mine.rollback() if step == 1 and second == "rolled back" else mine.commit()
            return [mean.tobytes() for mean in means]

        return Wire(2).run(rank)

    assert program("rolled back") == program("none")
    assert program("committed") != program("none")


def test_prepare_makes_all_state_without_a_word_to_anybody():
    wire = Wire(2, halves=False)
    strategy = Strategy("bf16", feedback=True, **SMALL)
    mine = make(wire.ranks[0], strategy)
    mine.prepare()
    assert wire.requests == []
    assert [sorted(site.cells) for site in mine._sites] == [["residual"]] * 4 + [[]]
    assert not any(cell.read().any() for site in mine._sites for cell in site.cells.values())
    assert (mine.started, mine.stats.steps, mine.stats.collectives) == (0, 0, 0)


def test_costs_are_counted():
    strategy = Strategy("fp16", **SMALL)
    _, stats, wire = run(4, strategy, steps=3)
    mine = make(LocalCollectives(), strategy)
    dense = sum(wire_bytes_dense(4 * bucket.count, 4) for bucket in mine.plan.buckets)
    assert [s.steps for s in stats] == [3] * 4
    assert [s.collectives for s in stats] == [15] * 4
    assert [s.bytes_dense for s in stats] == [3 * dense] * 4
    assert [s.bytes_sent for s in stats] == wire.bytes_sent
    assert 0.5 <= stats[0].bytes_sent / stats[0].bytes_dense < 0.51
    assert stats[0].seconds_encode > 0
    assert stats[0].seconds_wait >= 0


def test_exact_costs_what_is_dense():
    _, stats, _ = run(4, Strategy(**SMALL))
    assert stats[0].bytes_sent == stats[0].bytes_dense


def relative_error(strategy, steps=1, first=0, change=None, model=MODEL):
    _, stats, _ = run(2, strategy, steps, model, first=first, change=change)
    return stats[0].relative_error


def test_relative_error_is_sampled():
    assert relative_error(Strategy(**SMALL)) is None
    assert 1e-5 < relative_error(Strategy("fp16", **SMALL)) < 1e-3
    assert relative_error(Strategy("fp16", **SMALL), steps=99, first=1) is None
    assert 1e-5 < relative_error(Strategy("fp16", **SMALL), steps=100, first=1) < 1e-3
    assert relative_error(Strategy("fp16", warmup_steps=101, **SMALL), steps=2, first=99) is None


def test_without_residuals_one_bucket_is_copied_to_be_measured_and_with_them_none(monkeypatch):
    copied, copy = [], NumPyArrays.copy
    monkeypatch.setattr(NumPyArrays, "copy", lambda self, x: copied.append(x.size) or copy(self, x))
    model = [Parameter(f"layer{n}", (n,), "float32") for n in (301, 302, 303)]
    for turn in range(6):
        copied.clear()
        assert 1e-5 < relative_error(Strategy("fp16", **SMALL), first=100 * turn, model=model) < 1e-3
        assert copied == [[303, 302, 301][turn % 3]] * 2, "once on each rank"
    copied.clear()
    assert relative_error(Strategy("int8", **SMALL)) > 0
    assert not copied


def test_relative_error_survives_a_step_that_is_not_finite():
    def change(buffers, rank, step):
        if step == 100:
            buffers[0][0] = np.inf

    assert 1e-5 < relative_error(Strategy("fp16", **SMALL), steps=101, change=change) < 1e-3


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_a_sampled_step_that_is_not_finite_on_one_rank_measures_nothing_on_any(codec):
    def change(buffers, rank, step):
        if rank == 0:
            buffers[0][0] = np.inf

    _, stats, _ = run(2, Strategy(codec, **SMALL), change=change)
    assert [s.relative_error for s in stats] == [None, None]


def test_relative_error_is_that_of_what_was_given_though_a_codec_writes_into_it(monkeypatch):
    class Half:
        lossy = False

        def exchange(self, x, site):
            x *= np.float32(0.5)
            sent = x.copy()
            return Outcome((yield AllReduce(x, scale=1 / site.size)), sent)

    monkeypatch.setitem(registry._MAKERS, "half", Half)
    assert relative_error(Strategy("half", **SMALL)) == pytest.approx(0.5)


def test_sampling_changes_no_mean():
    means, _, _ = run(2, Strategy("fp16", **SMALL), steps=2)
    sampled, _, _ = run(2, Strategy("fp16", **SMALL), steps=2, first=99)
    assert [m.tobytes() for m in means[0][1]] == [m.tobytes() for m in sampled[0][1]]


def test_a_rank_that_does_not_come_is_an_error_that_names_step_and_bucket():
    messages = {}

    def program(collectives):
        mine = make(collectives, Strategy(**SMALL))
        buffers = values(mine, collectives.rank, 0)
        exchange(mine, buffers)
        if collectives.rank == 1:
            mine.start(buffers[0])
            return
        with pytest.raises(ExchangeError) as caught:
            exchange(mine, buffers)
        messages[collectives.rank] = str(caught.value)

    Wire(2).run(program)
    assert "cannot finish step 1, bucket 1 (layer2): " in messages[0]
    assert "rank 1 has ended" in messages[0]


def test_ranks_with_other_strategies_are_an_error_and_no_hang():
    def program(collectives):
        mine = make(collectives, Strategy(["exact", "fp16"][collectives.rank], **SMALL))
        exchange(mine, values(mine, collectives.rank, 0))

    with pytest.raises(ExchangeError, match=r"request 1: rank \d asks for AllReduce of float"):
        Wire(2).run(program)


def test_the_watch_knows_where_the_reducer_is():
    seen = []

    class Noting(LocalCollectives):
        def start(self, request, name):
            seen.append((mine._watch.position.step, mine._watch.position.what))
            return super().start(request, name)

    mine = make(Noting(), Strategy(**SMALL))
    for step in range(2):
        exchange(mine, values(mine, 0, step))
    labels = [bucket.label for bucket in mine.plan.buckets]
    assert seen == [(step, label) for step in range(2) for label in labels]
    assert (mine._watch.position.step, mine._watch.position.what) == (2, "outside an exchange")


def test_started_counts_what_flies():
    mine = make(LocalCollectives(), Strategy(**SMALL))
    buffers = values(mine, 0, 0)
    assert mine.started == 0
    mine.start(buffers[0])
    mine.start(buffers[1])
    assert mine.started == 2
    for buffer in buffers[2:]:
        mine.start(buffer)
    mine.finish()
    assert mine.started == 0


def test_one_codec_can_be_driven_by_hand():
    mine = make(LocalCollectives(), Strategy("fp16", **SMALL))
    x = np.array([1.0, 2.0], np.float32)
    outcome = run_alone(mine._codecs[0].exchange(x, mine._sites[0]), lambda request: request.value)
    assert outcome.mean.tolist() == [1.0, 2.0]
