"""Tests of the counting of micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdplus.reducer import Window


def play(length, loop):
    """Run a loop of ``b`` (backward) and ``s`` (step); return what each step was."""
    window, real = Window(length), []
    for event in loop:
        if event == "b":
            if window.full:
                window.restart()
            window.add()
        else:
            real.append(window.step())
            if real[-1]:
                window.restart()
    return real


LOOPS = {
    "no accumulation": (1, "bsbsbs", [True, True, True]),
    "a step after every micro-batch": (3, "bsbsbsbsbsbs", [False, False, True, False, False, True]),
    "a step after every window": (3, "bbbsbbbs", [True, True]),
    "a classic loop's last window is partial": (3, "bbbsbbs", [True, True]),
    "a classic loop is known by its first window": (4, "bbsbsbbbbs", [True, True, True]),
    "a step without a backward": (2, "sbsbss", [False, False, True, False]),
    "nothing": (2, "ss", [False, False]),
}


@pytest.mark.parametrize(("length", "loop", "real"), LOOPS.values(), ids=LOOPS)
def test_loops(length, loop, real):
    assert play(length, loop) == real


@given(st.integers(1, 8), st.integers(0, 40))
def test_a_step_after_every_micro_batch_is_real_once_a_window(length, count):
    assert play(length, "bs" * count) == [(i + 1) % length == 0 for i in range(count)]


@given(st.integers(1, 8), st.integers(1, 9))
def test_a_step_after_every_window_is_always_real(length, count):
    assert play(length, ("b" * length + "s") * count) == [True] * count


def test_closing_is_known_before_the_last_micro_batch():
    window, closing = Window(3), []
    for _ in range(3):
        closing.append(window.closing)
        window.add()
    assert closing == [False, False, True]
    assert window.full


def test_a_window_closed_by_hand_is_full_until_the_next_micro_batch():
    window = Window(3)
    window.add()
    window.close()
    assert window.full
    assert window.step()
    window.restart()
    assert not window.full
    window.close()
    window.add()
    assert not window.full


def test_resize_between_windows():
    window = Window(2)
    window.resize(3)
    window.add()
    with pytest.raises(
        ValueError, match=r"between windows only; this one has 1 of 3 micro-batches: finish it with flush"
    ):
        window.resize(2)
    assert window.length == 3
    window.restart()
    window.resize(2)
    assert window.length == 2


def test_a_full_window_that_is_resized_still_has_its_step():
    window = Window(1)
    window.add()
    window.resize(2)
    assert window.full
    assert window.step()
    window.restart()
    assert not window.full
    window.add()
    assert not window.full
