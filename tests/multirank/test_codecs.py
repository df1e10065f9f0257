"""Every codec on two ranks, and on four under mpi4py; with Keras, on two."""

import json
import re
import subprocess
import sys

import harness
import pytest

MODULE = "codec_scenarios.py"
LAUNCHES = [("horovodrun-gloo", 2), ("mpirun-mpi4py", 2), ("mpirun-mpi4py", 4)]


@pytest.mark.parametrize("scenario", harness.names(MODULE))
@pytest.mark.parametrize(("engine", "ranks"), LAUNCHES)
def test_scenario(engine, ranks, scenario):
    print(harness.scenarios(engine, ranks, MODULE).result(scenario))


@pytest.mark.parametrize("scenario", harness.names("codec_keras_scenarios.py"))
@pytest.mark.parametrize("engine", ["horovodrun-gloo", "mpirun-mpi4py"])
def test_keras_scenario(engine, scenario):
    pytest.importorskip("tensorflow")
    print(harness.scenarios(engine, 2, "codec_keras_scenarios.py").result(scenario))


@pytest.mark.parametrize(("engine", "framework"), [("mpirun-mpi4py", "none"), ("horovodrun-gloo", "torch")])
def test_bench_measures_these_ranks(engine, framework, tmp_path):
    file = tmp_path / "survey.json"
    argv = ["-m", "hvdplus.cli", "bench", "--codecs", "onebit", "--upto", "fp16", "--framework", framework]
    ended = harness.run(engine, 2, [*argv, "--parameters", "1M", "--json", str(file)], 120)
    assert ended.code == 0, ended.output
    found = json.loads(file.read_text())
    assert found["ranks"] == 2
    assert [cost["codec"] for cost in found["costs"]] == ["exact", "fp16", "onebit"]
    sent = [cost["bytes_each"] for cost in found["costs"]]
    assert sent == pytest.approx([4, 2, (0.125 + 2 / 256)], rel=0.01)
    assert re.search(r"1,000,000 gradients, 2 rank\(s\), engine (mpi|horovod)", ended.output), ended.output
    assert "The link:" in ended.output


def test_bench_on_one_rank_says_what_is_missing(tmp_path):
    argv = [sys.executable, "-m", "hvdplus.cli", "bench", "--codecs", "int8", "--upto", "fp16", "--framework", "none"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "There is one rank, so no network was measured" in " ".join(ended.stdout.split())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--parameters", "many"],
            "--parameters 'many' must be a number of at least 1, such as 25600000, 25.6M or 1.3B.",
        ),
        (["--codecs", "int9"], "codec 'int9' is unknown; known are"),
        (["--codecs", "auto"], "--codecs has 'auto', which chooses among codecs; name those to measure."),
        (["--upto", "all"], "upto='all' must be one of exact, fp16, int8, int4, ternary, onebit"),
        (["--framework", "jax"], "--framework 'jax' must be auto, none, torch or tensorflow."),
    ],
)
def test_bench_refuses_what_it_cannot_do(options, says):
    argv = [sys.executable, "-m", "hvdplus.cli", "bench", *options]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert says in ended.stderr
    assert ended.stderr.count("\n") == 1
