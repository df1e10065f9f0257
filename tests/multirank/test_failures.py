"""A rank that fails is heard: the others end in time, and say which rank, where, at which step and bucket."""

import re
import time

import harness
import pytest

TRAIN = str(harness.HERE / "failing.py")
SECONDS = 4  # HVDPLUS_TIMEOUT
HOST = r"rank 1 \(\S+\)"
CASES = {
    "raise": rf"{HOST} failed at step 3, outside an exchange in failing.py:\d+ load_batch: ValueError: boom: "
    r"no such file",
    "exit": rf"{HOST} has ended its program and will not come; if nothing failed there, give every rank",
    "sleep": rf"nothing came within HVDPLUS_TIMEOUT=4 s: {HOST} has not arrived: it is at step 3, outside an exchange "
    r"since \d+ s, in failing.py:\d+ load_batch",
    "kill": rf"{HOST} died: its connection closed without a word",
    "stop": rf"nothing came within HVDPLUS_TIMEOUT=4 s: {HOST} does not answer",
}


PAIRS = [("mpirun-mpi4py", mode) for mode in CASES] + [
    ("mpirun", "raise"),
    ("mpirun", "exit"),
    ("horovodrun-gloo", "raise"),
    ("horovodrun-gloo", "kill"),
    ("horovodrun-gloo", "sleep"),
]


@pytest.mark.parametrize(("engine", "mode"), PAIRS)
def test_the_other_rank_says_who_and_where(mode, engine):
    begin = time.monotonic()
    ended = harness.run(engine, 2, [TRAIN, mode, "1"], 90, HVDPLUS_TIMEOUT=str(SECONDS))
    assert ended.code not in (0, None), ended.output
    # One rank may have its answer when the other has not yet, who is then told at the step before.
    says = r"hvdplus: rank 0 \(\S+\) cannot finish step [23], bucket 0 \(bias ... weight\): " + CASES[mode]
    assert re.search(says, ended.output), ended.output
    assert "finished" not in ended.output
    assert time.monotonic() - begin < 60
    if mode == "raise":
        own, echo = ended.output.rindex("ValueError: boom"), ended.output.index("hvdplus: rank 0")
        assert echo < own, "the failing rank's own traceback comes last"


@pytest.mark.parametrize("mode", ["kill", "stop"])
def test_rank_0_can_fail_too(mode):
    ended = harness.run("mpirun-mpi4py", 2, [TRAIN, mode, "0"], 90, HVDPLUS_TIMEOUT=str(SECONDS))
    says = CASES[mode].replace("rank 1", "rank 0")
    assert re.search(r"hvdplus: rank 1 \(\S+\) cannot finish step 3, bucket 0 .*" + says, ended.output), ended.output
    assert ended.code not in (0, None)


@pytest.mark.parametrize("engine", ["mpirun-mpi4py", "mpirun"])
def test_nothing_is_said_when_all_is_well(engine):
    ended = harness.run(engine, 2, [TRAIN, "never", "1"], 90)
    assert ended.code == 0
    assert sorted(ended.output.splitlines()) == ["rank 0 finished", "rank 1 finished"]


def test_horovodrun_over_open_mpi_5():
    """As the README says: its binding options have to be replaced."""
    ended = harness.run("horovodrun-mpi", 2, [TRAIN, "never", "1"], 90)
    assert ended.code == 0, ended.output
    assert "rank 1 finished" in ended.output


INIT = "import hvdplus.torch as hvd; hvd.init(); print('silently', hvd.rank(), hvd.size())"


@pytest.mark.parametrize(
    ("engine", "wish", "says"),
    [
        ("mpirun", "local", "HVDPLUS_ENGINE=local serves one rank, but the launcher (openmpi) says 2"),
        ("horovodrun-gloo", "mpi", "the launcher (horovodrun) says rank 1 of 2, but engine 'mpi' says rank 0 of 1"),
        ("mpirun", "quantum", "HVDPLUS_ENGINE='quantum' is no engine; the engines are auto, horovod, mpi, local"),
    ],
)
def test_never_silently_rank_0_of_1(engine, wish, says):
    ended = harness.run(engine, 2, ["-c", INIT], 60, HVDPLUS_ENGINE=wish)
    assert ended.code not in (0, None)
    assert says in ended.output
    assert "silently" not in ended.output
