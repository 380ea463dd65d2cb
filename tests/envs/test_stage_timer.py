"""Stage timers."""

from __future__ import annotations

import time

import pytest

from headrace.envs.episodic_env import StageTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that stands still until a test moves it, in nanoseconds."""
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    return now


def test_starting_a_stage_ends_the_one_before(clock) -> None:
    timer = StageTimer()
    timer.start("physics")
    clock[0] = 3_000_000_000
    timer.start("task")
    clock[0] = 4_500_000_000
    timer.stop()
    assert timer.seconds() == {"physics": 3.0, "task": 1.5}
    assert timer.calls() == {"physics": 1, "task": 1}


def test_stages_add_up_over_calls(clock) -> None:
    timer = StageTimer()
    for _ in range(3):
        with timer.measure("physics"):
            clock[0] += 2_000_000_000
        clock[0] += 7_000_000_000
    assert timer.seconds() == {"physics": 6.0}
    assert timer.calls() == {"physics": 3}


def test_a_stage_that_raises_is_counted_and_ended(clock) -> None:
    timer = StageTimer()

    def fail_after_a_second() -> None:
        clock[0] += 1_000_000_000
        raise KeyError("task")

    with pytest.raises(KeyError), timer.measure("task"):
        fail_after_a_second()
    clock[0] += 1_000_000_000
    timer.stop()
    assert timer.seconds() == {"task": 1.0}


def test_stop_without_start_does_nothing_and_clear_forgets(clock) -> None:
    timer = StageTimer()
    timer.stop()
    assert timer.seconds() == {}
    timer.start("physics")
    clock[0] += 1
    timer.clear()
    timer.stop()
    assert timer.seconds() == timer.calls() == {}


def test_what_was_measured_cannot_be_changed_from_outside(clock) -> None:
    timer = StageTimer()
    with timer.measure("physics"):
        pass
    timer.seconds().clear()
    timer.calls().clear()
    assert timer.calls() == {"physics": 1}
