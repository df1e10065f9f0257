"""Tests of the choice of an engine."""

from __future__ import annotations

import pytest

from hvdplus import LaunchError
from hvdplus.engines import check, choose, wanted
from hvdplus.world import World


def world(size=2, launcher="openmpi", rank=0):
    return World(rank, size, None, None, launcher)


ALONE = world(1, "none")
# wish, world, Horovod serves it, mpi4py is there: engine
CHOICES = {
    "Horovod first": ("auto", world(), True, True, "horovod"),
    "Horovod for one rank too": ("auto", ALONE, True, True, "horovod"),
    "MPI where Horovod is not": ("auto", world(), False, True, "mpi"),
    "MPI in a Slurm step": ("auto", world(launcher="slurm"), False, True, "mpi"),
    "one rank without anything": ("auto", ALONE, False, False, "local"),
    "one rank needs no MPI": ("auto", ALONE, False, True, "local"),
    "one rank under mpirun": ("auto", world(1), False, True, "local"),
    "local by wish": ("local", ALONE, True, True, "local"),
    "MPI by wish": ("mpi", world(), True, True, "mpi"),
    "Horovod by wish": ("horovod", world(), False, False, "horovod"),
}


@pytest.mark.parametrize(("wish", "where", "horovod", "mpi", "engine"), CHOICES.values(), ids=CHOICES)
def test_choose(wish, where, horovod, mpi, engine):
    assert choose(wish, where, lambda _: horovod, lambda: mpi) == engine


REFUSED = {
    "nothing is there": ("auto", world(rank=1), False, False, ["openmpi", "rank 1 of 2", "hvdplus install-horovod"]),
    "MPI cannot join torchrun": ("auto", world(launcher="torchrun"), False, True, ["torchrun", "rank 0 of 2"]),
    "MPI cannot join horovodrun": ("auto", world(launcher="horovodrun"), False, True, ["horovodrun"]),
    "local for two": ("local", world(), True, True, ["HVDPLUS_ENGINE=local", "openmpi", "2"]),
}


@pytest.mark.parametrize(("wish", "where", "horovod", "mpi", "words"), REFUSED.values(), ids=REFUSED)
def test_never_silently_one_rank(wish, where, horovod, mpi, words):
    with pytest.raises(LaunchError) as caught:
        choose(wish, where, lambda _: horovod, lambda: mpi)
    assert all(word in str(caught.value) for word in words), caught.value


def test_mpi_is_not_loaded_where_it_is_not_needed():
    def never():
        raise AssertionError

    assert choose("auto", ALONE, lambda _: False, never) == "local"
    assert choose("auto", world(), lambda _: True, never) == "horovod"


def test_only_an_mpi_library_knows_how_many_pmix_counts(caplog):
    def chosen(number, mpi, where=ALONE):
        return choose("auto", where, lambda _: False, lambda: mpi, {"PMIX_RANK": number})

    assert chosen("0", mpi=True) == chosen("3", mpi=True) == "mpi"
    assert chosen("3", mpi=True, where=world(1)) == "local"  # a launcher that tells its size is believed
    assert caplog.text == ""
    assert chosen("0", mpi=False) == "local"
    assert "PMIX_RANK=0 is set, but nothing says how many" in caplog.text
    with pytest.raises(LaunchError, match=r"PMIX_RANK=3 .* HVDPLUS_RANK and HVDPLUS_SIZE"):
        chosen("3", mpi=False)


def test_check_believes_the_engine_of_an_elastic_job():
    where = world(4, "horovodrun", rank=3)
    check(where, "horovod", 1, 2, {"HOROVOD_ELASTIC": "1"})
    with pytest.raises(LaunchError):
        check(where, "horovod", 1, 2, {"HOROVOD_ELASTIC": "0"})


def test_check_accepts_what_agrees():
    check(world(4, rank=3), "mpi", 3, 4)
    check(ALONE, "local", 0, 1)
    check(ALONE, "horovod", 1, 2)  # an engine may know what no variable says


@pytest.mark.parametrize(
    ("where", "rank", "size"),
    [(world(4, rank=3), 0, 1), (world(4, rank=3), 2, 4), (world(4, rank=3), 3, 8), (world(1), 0, 2)],
)
def test_check_refuses_what_does_not(where, rank, size):
    with pytest.raises(LaunchError) as caught:
        check(where, "horovod", rank, size)
    message = str(caught.value)
    assert f"rank {where.rank} of {where.size}" in message
    assert f"rank {rank} of {size}" in message
    assert "'horovod'" in message
    assert "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE" in message


def test_wanted():
    assert wanted({}) == wanted({"HVDPLUS_ENGINE": ""}) == "auto"
    assert wanted({"HVDPLUS_ENGINE": "mpi"}) == "mpi"
    with pytest.raises(LaunchError, match=r"HVDPLUS_ENGINE='nccl' is no engine; .* auto, horovod, mpi, local"):
        wanted({"HVDPLUS_ENGINE": "nccl"})
