"""Tests of how a job starts, with a framework that is plain NumPy."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from hvdplus import LaunchError, session
from hvdplus.collectives import LocalCollectives
from hvdplus.session import Framework
from hvdplus.testing import Wire
from hvdplus.world import World

LAUNCHERS = "HVDPLUS_ OMPI_ PMI SLURM_ HOROVOD_ MPI_ MV2_ PALS_ JSM_ FLUX_ RANK WORLD_SIZE LOCAL_ TORCHELASTIC_"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher, and the hook that a line leaves is undone."""
    for name in list(os.environ):
        if name.startswith(tuple(LAUNCHERS.split())):
            monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def framework(horovod=None, serves=False):
    return Framework(
        name="numpy",
        lend=lambda array: array,
        read=lambda array: array,
        host=lambda collectives: collectives,
        horovod=horovod or (lambda *args, **kwargs: pytest.fail("Horovod is not wanted")),
        horovod_serves=lambda world: serves,
        horovod_stop=lambda: None,
    )


def run(size, program, wire=None):
    """Start a session on every rank of a wire that plays Horovod, and call ``program`` with it."""

    def rank(collectives):
        started = session.start(framework(lambda: collectives, serves=True))
        try:
            started.gather(b"arrived")
            return program(started)
        finally:
            gathered = started.gather(b"leaving")  # rank 0 holds the hub and leaves last
            assert len(gathered) == size
            started.watch.disconnect()

    return (wire or Wire(size)).run(rank)


def test_one_rank_is_local():
    started = session.start(framework())
    assert started.world == World(0, 1, 0, 1, "none")
    assert started.engine == "local"
    assert isinstance(started.collectives, LocalCollectives)
    assert started.cross == (0, 1)
    assert started.gather(b"x") == [b"x"]


def test_several_ranks_find_each_other():
    worlds = run(3, lambda s: (s.world, s.engine, s.cross))
    assert worlds == [(World(rank, 3, rank, 3, "none"), "horovod", (0, 1)) for rank in range(3)]


def test_local_and_cross_rank_come_from_host_names(monkeypatch):
    hosts = ["a", "b", "a", "b", "b"]
    gather = session.Session.gather

    def by_host(self, payload, collectives=None):
        answers = gather(self, payload, collectives)
        return [host.encode() for host in hosts] if payload == session.socket.gethostname().encode() else answers

    monkeypatch.setattr(session.Session, "gather", by_host)
    found = run(5, lambda s: (s.world.local_rank, s.world.local_size, s.cross))
    assert found == [(0, 2, (0, 2)), (0, 3, (1, 2)), (1, 2, (0, 2)), (1, 3, (1, 2)), (2, 3, (0, 1))]


def test_payloads_of_any_length_are_gathered_in_rank_order():
    payloads = [b"", b"\0\0", "é".encode() * 300]
    assert run(3, lambda s: s.gather(payloads[s.world.rank])) == [payloads] * 3


@pytest.mark.parametrize("value", [np.arange(6.0).reshape(2, 3), np.array(True), np.array([1j]), np.zeros((0, 2))])
@pytest.mark.parametrize("root", [0, 2])
def test_an_array_of_any_dtype_is_copied_from_the_root(value, root):
    def program(started):
        mine = value if started.world.rank == root else np.zeros_like(value)
        return started.broadcast(mine, root)

    for copied in run(3, program):
        assert copied.dtype == value.dtype
        np.testing.assert_array_equal(copied, value)


def test_nothing_at_all_can_be_gathered():
    assert run(2, lambda s: s.gather(b"")) == [[b"", b""]] * 2


def test_an_engine_that_sees_another_world_is_refused(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(
        LaunchError, match=r"the launcher \(openmpi\) says rank 1 of 4, but engine 'horovod' says rank 0 of"
    ):
        session.start(framework(LocalCollectives, serves=True))


def test_several_ranks_without_an_engine_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="no engine here can serve it"):
        session.start(framework())


def test_arguments_are_horovods():
    seen = []

    def horovod(*args, **kwargs):
        seen.append((args, kwargs))
        return LocalCollectives()

    session.start(framework(horovod, serves=True), [0], process_sets=[])
    assert seen == [(([0],), {"process_sets": []})]
    with pytest.raises(LaunchError, match=r"init\(\) takes arguments with engine 'horovod' only, .* engine 'local'"):
        session.start(framework(), [0])


def test_a_launchers_other_local_rank_is_warned_of(monkeypatch, caplog):
    for name, value in {"RANK": 0, "SIZE": 1, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}.items():
        monkeypatch.setenv(f"HVDPLUS_{name}", str(value))
    assert session.start(framework()).world == World(0, 1, 0, 1, "override")
    assert caplog.text == ""


@pytest.mark.parametrize(("given", "expected"), [({}, 0), ({"HVDPLUS_LOCAL_RANK": "2"}, 2)])
def test_a_local_rank_given_by_hand_is_not_corrected_by_host_names(monkeypatch, given, expected):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    at = World(0, 4, int(given.get("HVDPLUS_LOCAL_RANK", 1)), None, "jsrun")
    monkeypatch.setattr(session, "discover", lambda: at)
    monkeypatch.setattr(session.Session, "gather", lambda self, payload, collectives=None: [b"a", b"b", b"a", b"b"])
    collectives = LocalCollectives()
    collectives.rank, collectives.size = 0, 4
    monkeypatch.setattr(session.Watch, "connect", lambda self, gather: None)
    assert session.start(framework(lambda: collectives, serves=True)).world.local_rank == expected


@pytest.mark.parametrize("parent", [None, object()], ids=["started by hand", "started by multiprocessing"])
def test_a_child_of_multiprocessing_is_told_that_it_is_alone(monkeypatch, caplog, parent):
    monkeypatch.setattr(session.multiprocessing, "parent_process", lambda: parent)
    session.start(framework())
    assert ("started by multiprocessing, not by a launcher" in caplog.text) == (parent is not None)


def test_gathers_have_names_of_their_own():
    wire = Wire(2)
    assert run(2, lambda s: [s.gather(bytes([n]))[1] for n in range(2)], wire) == [[b"\0", b"\1"]] * 2
    assert len(set(wire.names)) == len(wire.names) >= 4
