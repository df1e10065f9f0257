"""Tests of the line between ranks: several watches in one process, a thread each where they must meet."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdplus import ExchangeError, StrategyError, watch
from hvdplus.collectives import Ready
from hvdplus.watch import Watch

HOST = socket.gethostname()


class Never:
    """A request that is never answered."""

    def done(self):
        return False

    def result(self):
        raise AssertionError("nobody may wait here without a limit")


class Failing:
    """A request at which the engine gives up."""

    def __init__(self, error):
        self.error = error

    def done(self):
        return True

    def result(self):
        raise self.error


class Meeting:
    """An all-gather among threads."""

    def __init__(self, size):
        self.barrier, self.rows = threading.Barrier(size, timeout=20), [b""] * size

    def of(self, rank):
        def gather(payload):
            self.barrier.wait()
            self.rows[rank] = payload
            self.barrier.wait()
            return list(self.rows)

        return gather


@pytest.fixture
def connected(monkeypatch):
    """Make watches with a line between them; short waits, and all of it undone afterwards."""
    monkeypatch.setattr(watch, "_SPEAK_SECONDS", 0.05)
    monkeypatch.setattr(watch, "_LEFT_SECONDS", 0.2)
    monkeypatch.setattr(watch, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(watch, "_PART_SECONDS", 0.1)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    made: list[Watch] = []

    def make(size):
        made.extend(Watch(rank, size) for rank in range(size))
        meeting = Meeting(size)
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(lambda w: w.connect(meeting.of(w.rank)), made))
        return made

    yield make
    for one in reversed(made):
        one.disconnect()


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def raised(call, *arguments):
    with pytest.raises(ExchangeError) as caught:
        call(*arguments)
    return str(caught.value)


def fail(one, error):
    try:
        raise error
    except type(error) as caught:
        one.fail(type(caught), caught, caught.__traceback__)


def test_what_is_there_is_returned_at_once():
    assert Watch(0, 2).wait(Ready(3)) == 3


def test_a_failure_is_heard_by_all_others_and_says_where(connected):
    watches = connected(3)
    watches[1].at(7, "bucket 2 (head)")
    for other in (0, 2):
        watches[other].at(7, "bucket 2 (head)")
    fail(watches[1], KeyError("label"))
    for other in (0, 2):
        message = raised(watches[other].wait, Never())
        assert message.startswith(
            f"rank {other} ({socket.gethostname()}) cannot finish step 7, bucket 2 (head): rank 1 "
        )
        assert "failed at step 7, bucket 2 (head) in test_watch.py:" in message
        assert message.endswith("KeyError: 'label'")
    assert watches[1].failure is None


def test_the_first_failure_stays(connected):
    watches = connected(3)
    fail(watches[1], KeyError("first"))
    wait_until(lambda: watches[0].failure)
    fail(watches[2], KeyError("second"))
    time.sleep(0.05)
    assert "first" in watches[0].failure


def test_an_error_that_only_tells_of_a_failure_is_not_passed_on(connected):
    watches = connected(3)
    fail(watches[1], KeyError("cause"))
    raised(watches[2].wait, Never())
    echo = watches[2].echo
    said = []
    watches[2]._line.send = said.append
    watches[2].fail(type(echo), echo, None)
    assert said == []
    assert watches[0].failure.startswith("rank 1 ")


def test_a_rank_that_vanishes_is_noticed(connected):
    watches = connected(3)
    watches[2]._line.close()  # as a killed process: its socket closes without a word
    message = raised(watches[1].wait, Never())
    assert f"rank 2 ({HOST}) died: its connection closed without a word" in message


def test_the_hub_that_vanishes_is_noticed(connected):
    watches = connected(2)
    watches[1]._line._socket.shutdown(socket.SHUT_RD)
    assert f"rank 0 ({HOST}) died: its connection closed without a word" in raised(watches[1].wait, Never())


def test_a_rank_that_left_is_named_with_what_to_do(connected):
    watches = connected(3)
    watches[2].disconnect()
    message = raised(watches[0].wait, Never())
    assert (
        f"rank 2 ({HOST}) has ended its program and will not come; if nothing failed there, give every rank the same "
        f"number of batches" in message
    )


def test_an_answer_that_comes_late_is_taken_though_a_rank_has_left(connected):
    watches = connected(2)
    watches[1].disconnect()
    wait_until(lambda: watches[0].left)
    late = time.monotonic() + 0.1

    class Late(Never):
        def done(self):
            return time.monotonic() > late

        def result(self):
            return "answer"

    assert watches[0].wait(Late()) == "answer"


def test_explain_names_those_that_are_elsewhere(connected):
    watches = connected(3)
    for one in watches[:2]:
        one.at(5, "bucket 1 (b)")
        one.position.waiting = True
    watches[2].at(4, "bucket 0 (a)")
    message = watches[0].explain()
    assert message.startswith(
        f"rank 2 ({socket.gethostname()}) has not arrived: it is at step 4, bucket 0 (a) since 0 s"
    )
    assert "rank 1" not in message
    assert ".py:" in message


def test_explain_says_so_where_all_are_here(connected):
    watches = connected(2)
    for one in watches:
        one.at(5, "bucket 1 (b)")
        one.position.waiting = True
    assert watches[1].explain() == "all ranks are in the same exchange, so the network is stuck"


def test_explain_says_who_does_not_answer_and_who_has_ended(connected):
    watches = connected(3)
    watches[1].disconnect()
    watches[2]._heard = lambda message, line: None  # stopped
    wait_until(lambda: 1 in watches[0].left)
    assert watches[0].explain() == (
        f"rank 1 ({HOST}) has ended its program; rank 2 ({HOST}) does not answer (stopped, or cut off)"
    )


def test_a_time_out_names_rank_step_and_what_and_asks_the_others(connected, monkeypatch):
    monkeypatch.setenv("HVDPLUS_TIMEOUT", "0.2")
    watches = connected(2)
    watches[0].at(3, "bucket 1 (b)")
    watches[1].at(2, "outside an exchange")
    message = raised(watches[0].wait, Never())
    assert message.startswith(
        f"rank 0 ({socket.gethostname()}) cannot finish step 3, bucket 1 (b): nothing came within "
    )
    assert "HVDPLUS_TIMEOUT=0.2 s: rank 1 " in message
    assert "it is at step 2, outside an exchange" in message
    assert watches[0].raised


def test_the_others_are_asked_while_there_is_time(connected, monkeypatch):
    """So the error comes when HVDPLUS_TIMEOUT is over, even where a rank does not answer."""
    monkeypatch.setenv("HVDPLUS_TIMEOUT", "4")
    watches = connected(2)

    class OnceAsked(Never):
        def done(self):
            return bool(watches[0]._statuses)

        def result(self):
            return "in time"

    assert watches[0].wait(OnceAsked()) == "in time"


def test_a_time_out_without_a_line(monkeypatch):
    monkeypatch.setenv("HVDPLUS_TIMEOUT", "0.05")
    assert "no rank can be asked" in raised(Watch(1, 2).wait, Never())


def test_a_long_wait_warns_before_it_ends(connected, monkeypatch, caplog):
    monkeypatch.setenv("HVDPLUS_TIMEOUT", "0.3")
    monkeypatch.setenv("HVDPLUS_WARN", "0.1")
    watches = connected(2)
    watches[0].at(3, "bucket 1 (b)")
    with caplog.at_level(logging.WARNING, "hvdplus"):
        raised(watches[0].wait, Never())
    assert "rank 0 waits in step 3, bucket 1 (b)" in caplog.text
    assert "has not arrived" in caplog.text


@pytest.mark.parametrize("name", ["HVDPLUS_TIMEOUT", "HVDPLUS_WARN"])
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "1 h"])
def test_seconds_are_validated(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(StrategyError) as caught:
        Watch(0, 1)
    assert f"{name}={value!r} must be a number of seconds above 0" in str(caught.value)


def test_seconds_are_read(monkeypatch):
    assert (Watch(0, 1).limit, Watch(0, 1).warn_after) == (600.0, 60.0)
    monkeypatch.setenv("HVDPLUS_TIMEOUT", "1.5")
    monkeypatch.setenv("HVDPLUS_WARN", "")
    assert (Watch(0, 1).limit, Watch(0, 1).warn_after) == (1.5, 60.0)


def test_an_engines_complaint_is_ours_and_its_own():
    class EngineError(RuntimeError):
        pass

    one = Watch(0, 2)
    one.at(1, "bucket 0 (a)")
    with pytest.raises(EngineError) as caught:
        one.wait(Failing(EngineError("peer closed")))
    assert isinstance(caught.value, ExchangeError)
    assert "cannot finish step 1, bucket 0 (a): the engine gave up: peer closed" in str(caught.value)
    assert isinstance(caught.value.__cause__, EngineError)


def test_an_engines_complaint_gives_way_to_its_cause(connected):
    watches = connected(2)
    threading.Timer(0.1, fail, (watches[1], KeyError("cause"))).start()
    message = raised(watches[0].wait, Failing(ValueError("peer closed")))
    assert "KeyError: 'cause'" in message
    assert "peer closed" not in message


def test_one_rank_needs_no_line():
    before = sys.excepthook
    one = Watch(0, 1)
    one.connect(lambda payload: pytest.fail("nobody to gather from"))
    assert one._line is None
    assert sys.excepthook is before


def test_the_hub_hangs_up_on_strangers(connected):
    watches = connected(2)
    port = watches[0]._hub.offer["port"]
    for words in (b'{"hello": "guess", "rank": 1}\n{"failed": "x", "rank": 1}\n', b"GET / HTTP/1.1\r\n\r\n", b"[]\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(words)
            assert stranger.recv(100) == b""
    assert [one.failure for one in watches] == [None, None]
    watches[0].at(1, "a")
    watches[1].at(1, "b")
    assert "rank 1" in watches[0].explain()


def test_without_a_line_ranks_go_on_and_one_warns(monkeypatch, caplog):
    monkeypatch.setattr(watch._Line, "open", classmethod(lambda cls, offer, rank: None))
    watches, meeting = [Watch(rank, 2) for rank in range(2)], Meeting(2)
    with ThreadPoolExecutor(2) as pool, caplog.at_level(logging.WARNING, "hvdplus"):
        list(pool.map(lambda w: w.connect(meeting.of(w.rank)), watches))
    assert "no line to rank 0" in caplog.text
    watches[0].disconnect()
    assert watches[1].wait(Ready(1)) == 1
