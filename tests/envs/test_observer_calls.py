"""What observers are shown, and what becomes of an environment whose observer raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import pytest
import torch

import headrace
from headrace.bench.builders import StepTimes
from headrace.errors import StorageError
from headrace.types import ResetRecord, StepRecord


class Counter:
    """Counts, and raises in the step whose number it is given."""

    def __init__(self, needs: frozenset[Literal["states", "frames"]] = frozenset(), fail_at: int | None = None) -> None:
        self.needs = needs
        self.steps = 0
        self.begun: list[int] = []
        self._fail_at = fail_at

    def after_reset(self, record: ResetRecord) -> None:
        self.begun += record.episode_ids.tolist()

    def after_step(self, record: StepRecord) -> None:
        self.steps += 1
        if self.steps == self._fail_at:
            raise StorageError("the disk is full")


def _cartpoles() -> headrace.BatchEnv:
    return headrace.make("cartpole", 3, threads=1, overrides={"episode_length": 2})


@pytest.mark.parametrize(
    ("make", "actions"),
    [
        (_cartpoles, torch.zeros(3, 1)),
        (
            lambda: headrace.bridge("CartPole-v1", 3, env_kwargs={"max_episode_steps": 2}),
            torch.zeros(3, dtype=torch.int64),
        ),
    ],
    ids=["batch", "bridge"],
)
def test_an_observer_that_raises_at_the_end_of_an_episode_does_not_keep_it_from_ending(
    make: Callable[[], headrace.BatchEnv], actions: torch.Tensor
) -> None:
    env, twin, counter = make(), make(), Counter(fail_at=2)
    env.attach(counter)
    env.reset()
    twin.reset()
    env.step(actions)
    twin.step(actions)
    with pytest.raises(StorageError, match="full"):
        env.step(actions)
    twin.step(actions)
    assert env.episode_ids.tolist() == [3, 4, 5]
    assert env.episode_steps.tolist() == [0, 0, 0]
    assert counter.begun == [0, 1, 2, 3, 4, 5]
    assert torch.equal(env.step(actions).obs["policy"], twin.step(actions).obs["policy"])


def test_no_stage_runs_on_after_an_observer_that_raises() -> None:
    env = headrace.make("cartpole", 3, threads=1)
    env.attach(Counter(fail_at=1))
    env.reset()
    with pytest.raises(StorageError, match="full"):
        env.step(torch.zeros(3, 1))
    before = env.timer.seconds()
    env.timer.stop()  # would add what has gone by to a stage that still runs
    assert env.timer.seconds() == before


@pytest.mark.parametrize(("needs", "frames"), [(frozenset(), 0), (frozenset({"frames"}), 3)])
def test_only_an_observer_that_needs_frames_has_them_drawn(needs: frozenset[Literal["frames"]], frames: int) -> None:
    env = headrace.make("cartpole-camera", 3, threads=1, overrides={"frame_stack": 1, "pixels": 8})
    env.attach(Counter(needs))
    nobody = torch.zeros(3, dtype=torch.bool)
    env.reset(options={"observe": nobody})
    assert env.frames_drawn == frames
    env.step(torch.zeros(3, 1), observe=nobody)
    assert env.frames_drawn == 2 * frames


def test_an_end_that_nobody_bootstraps_from_is_drawn_only_for_an_observer_that_needs_frames() -> None:
    drawn: list[int] = []
    for needs in (frozenset[Literal["states", "frames"]](), frozenset[Literal["states", "frames"]]({"frames"})):
        settings = {"frame_stack": 1, "pixels": 8, "episode_length": 1}
        env = headrace.make("cartpole-camera", 3, threads=1, final_obs=False, overrides=settings)
        env.attach(Counter(needs))
        env.reset()
        env.step(torch.zeros(3, 1))
        drawn.append(env.frames_drawn)
    # the first of each episode; and the last of those that ended
    assert drawn == [6, 9]


def test_the_time_of_observers_is_not_the_tasks() -> None:
    class Slow(Counter):
        def after_step(self, record: StepRecord) -> None:
            time.sleep(0.02)

    env = _cartpoles()
    env.attach(Slow())
    env.reset()
    env.timer.clear()
    for _ in range(5):
        env.step(torch.zeros(3, 1))
    spent = env.timer.seconds()
    assert spent["observers"] >= 0.1
    times = StepTimes(mode="host_return")
    times.begin(dict.fromkeys(spent, 0.0))
    times.add(sum(spent.values()), 3, spent)
    timing = times.timing()
    assert timing is not None
    assert timing.task_step_time_s is not None
    assert timing.task_step_time_s.mean == pytest.approx(spent["task"] + spent["reset"])
