"""The studies of accuracy and of training: what they run, what they skip, and what they make of it."""

import argparse
import doctest
import json

import accuracy
import pytest
import training

COMMON = {"steps": 30, "lr": 0.1}


def curve(loss, bytes_sent=0):
    return [
        {"step": 0, "seconds": 0.0, "loss": 4.0, "bytes_sent": 0},
        {"step": 10, "seconds": 10.0, "loss": loss, "bytes_sent": bytes_sent},
    ]


@pytest.mark.parametrize("module", [accuracy, training])
def test_examples_are_true(module):
    assert doctest.testmod(module).failed == 0


def test_the_study_has_every_codec_at_every_seed_and_no_run_twice():
    found = list(accuracy.jobs([1, 2], dense=5))
    assert len(set(found)) == len(found)
    for codec in ("exact", *accuracy.ALLOWED, *accuracy.OTHERS):
        assert {job.seed for job in found if job.codec == codec and job.ranks == 2} == {1, 2}
    assert {job.dense for job in found if job.codec in accuracy.AS_THEY_ARE and job.momentum} == {0}
    assert {job.dense for job in found if not job.momentum} == {5}, "momentum is taken away where codecs set in"


def test_percentages_are_taken_seed_by_seed_against_exact_on_as_many_ranks():
    found = {
        accuracy.Job("exact", 1, 2, 0): curve(2.0),
        accuracy.Job("exact", 2, 2, 0): curve(1.0),
        accuracy.Job("exact", 1, 4, 0): curve(1.6),
        accuracy.Job("onebit", 1, 2, 5): curve(2.02, bytes_sent=70),
        accuracy.Job("onebit", 2, 2, 5): curve(1.03, bytes_sent=70),
        accuracy.Job("onebit", 1, 4, 5): curve(1.6),
        accuracy.Job("int8", 3, 2, 5): curve(1.0),  # exact has not got there yet
        accuracy.Job("exact", 1, 2, 5, momentum=0.0): curve(2.2),  # what nothing is compared with
    }
    rows = {(row["codec"], row["ranks"]): row for row in accuracy.report(found) if row["momentum"]}
    row = rows["onebit", 2]
    assert (row["above_percent"], row["least_percent"], row["most_percent"]) == pytest.approx((2.0, 1.0, 3.0))
    assert (row["bytes_a_step"], row["seeds"]) == (7.0, [1, 2])
    assert rows["onebit", 4]["above_percent"] == 0.0
    assert "int8" not in {codec for codec, _ in rows}


def test_a_run_is_made_once_and_only_what_failed_again(tmp_path, monkeypatch):
    made, bad = [], accuracy.Job("int8", 1, 2, 30)

    def run(job, common, out):
        made.append(job)
        if job == bad and made.count(job) == 1:
            return False
        about = {"means": accuracy.meaning(job), "machine": "a box", "settings": common}
        line = accuracy.asdict(job) | about | {"curve": curve(2.0, bytes_sent=10)}
        with (out / "results.jsonl").open("a") as file:
            print(json.dumps(line), file=file)
        return True

    monkeypatch.setattr(accuracy, "run", run)
    monkeypatch.setattr("sys.argv", ["accuracy.py", "--out", str(tmp_path), "--seeds", "1"])
    assert (accuracy.main(), len(made)) == (1, len(list(accuracy.jobs([1], 30))))
    assert (accuracy.main(), made[-1], made.count(bad)) == (0, bad, 2)
    assert all((tmp_path / name).stat().st_size for name in ("accuracy.json", "accuracy.md", "accuracy.png"))
    assert "a box." in (tmp_path / "accuracy.md").read_text()

    lines = (tmp_path / "results.jsonl").read_text()
    (tmp_path / "results.jsonl").write_text(lines.replace("OneBit(block=256", "OneBit(block=64"))
    assert accuracy.main() == 0
    assert {job.codec for job in made[-3:]} <= {"onebit", "onebit:averages=ternary", "onebit:averages=int4"}

    monkeypatch.setattr("sys.argv", ["accuracy.py", "--out", str(tmp_path), "--seeds", "1", "--steps", "60"])
    before = len(made)
    accuracy.main()
    assert len(made) == before + len(list(accuracy.jobs([1], 30)))  # of other settings nothing is taken over


def test_time_to_a_loss_is_compared_with_horovods_fp16():
    slow = {"name": training.MEASURE, "curve": curve(2.0)}
    quick = {"name": "int4", "curve": [entry | {"seconds": entry["seconds"] / 4} for entry in curve(1.0)]}
    worse = {"name": "onebit", "curve": curve(2.01)}
    _, better, close = training.compared([slow, quick, worse], within=1.0)
    assert better["same_ratio"] == pytest.approx(10.0 / (10.0 / 4 * 2 / 3))
    assert (close["same_ratio"], close["above_percent"]) == (None, pytest.approx(0.5))
    assert close["near_ratio"] == pytest.approx((10 * 1.98 / 2) / (10 * 1.98 / 1.99))


def test_a_training_is_started_with_its_codec_or_horovods_compression(tmp_path):
    args = argparse.Namespace(size="1m", context=8, batch=2, steps=40, lr=0.1, seed=3, fields="warmup_steps=2")
    stock = training.program("horovod fp16", args, tmp_path / "a")
    ours = training.program("topk:0.01", args, tmp_path / "a")
    assert stock[1].endswith("stock_gpt.py")
    assert stock[2:4] == ["--compression", "fp16"]
    assert ours[1].endswith("torch_gpt.py")
    assert ours[2:4] == ["--strategy", "topk:0.01,warmup_steps=2"]
    assert stock[4:] == ours[4:]
    longer = training.program("topk:0.01 no-momentum@99", args, tmp_path / "a")
    assert longer[2:6] == [*ours[2:4], "--momentum", "0"]
    assert longer[6:] == ["99" if part == "40" else part for part in ours[4:]]
