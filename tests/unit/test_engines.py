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


def test_wanted():
    assert wanted({}) == wanted({"HVDPLUS_ENGINE": ""}) == "auto"
    assert wanted({"HVDPLUS_ENGINE": "mpi"}) == "mpi"
    with pytest.raises(LaunchError, match=r"HVDPLUS_ENGINE='nccl' is no engine; .* auto, horovod, mpi, local"):
        wanted({"HVDPLUS_ENGINE": "nccl"})
