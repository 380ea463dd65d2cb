"""The loop of runtime benchmarks: warm-up that is proven, times that add up, on tasks and bridges."""

from __future__ import annotations

import itertools
from contextlib import closing

import numpy as np
import pytest
import torch
from examples import filled, origin
from gymnasium import spaces

from headrace.bench.benchmark import rendering_backend
from headrace.bench.builders import RuntimeBuilder, StepTimes
from headrace.bench.stepping import Stepper, WarmupRule, action_maker, warm_up
from headrace.envs.recipe import EnvRecipe
from headrace.errors import ConfigError, UnsupportedError

CPU = torch.device("cpu")


# --- warm-up ---


def test_warm_up_goes_on_until_the_step_time_is_steady() -> None:
    falling = itertools.chain((1.0 / (1 + i) for i in range(100)), itertools.repeat(0.01))
    found = warm_up(lambda n: [next(falling) for _ in range(n)], WarmupRule(steps=20))
    assert found is not None
    assert found.steady
    assert found.steps > 100, "the first hundred fall"
    last = found.block_medians_s[-3:]
    assert max(last) <= 1.05 * min(last)
    assert found.seconds > 5.0


def test_warm_up_that_never_gets_steady_says_so() -> None:
    growing = itertools.count(1.0)
    found = warm_up(lambda n: [next(growing) ** 3 for _ in range(n)], WarmupRule(steps=20))
    assert found is not None
    assert not found.steady
    assert found.steps == 400


def test_warm_up_takes_at_least_the_steps_asked_for() -> None:
    found = warm_up(lambda n: [1.0] * n, WarmupRule(steps=200))
    assert found is not None
    assert found.steps == 200
    assert warm_up(lambda n: [1.0] * n, WarmupRule(steps=0)) is None
    with pytest.raises(ConfigError, match="--warmup-steps"):
        WarmupRule(steps=-1)


# --- steps ---


def test_the_split_of_a_step_adds_up() -> None:
    steps = StepTimes()
    filled(steps, [0.5, 0.25])
    timing = steps.timing()
    assert timing is not None
    parts = (timing.simulation_step_time_s, timing.render_step_time_s, timing.task_step_time_s)
    assert [part.samples for part in parts if part] == [[0.25, 0.125], [0.125, 0.0625], [0.125, 0.0625]]
    assert timing.outside_simulation_step_fraction == 0.5
    assert timing.outside_simulation_step_time_s is not None
    assert timing.outside_simulation_step_time_s.samples == [0.25, 0.125]
    assert timing.environment_step_fps == 8 / 0.75, "frames over seconds, not the mean of 8 and 16"


def test_an_environment_that_does_not_tell_has_no_split() -> None:
    steps = StepTimes()
    steps.begin()
    steps.add(0.5, 4)
    timing = steps.timing()
    assert timing is not None
    assert timing.simulation_step_time_s is timing.outside_simulation_step_fraction is None


@pytest.mark.parametrize("text", ["cartpole", "cartpole-camera", "gym:CartPole-v1"])
def test_a_loop_over_an_environment_measures_every_step(text: str) -> None:
    recipe = EnvRecipe(text, num_envs=3, seed=1)
    builder = RuntimeBuilder()
    with closing(recipe.make()) as env:
        actions = action_maker("random", env.single_action_space, 3, env.device, seed=1)
        stepper = Stepper(env, actions, builder)
        env.reset()
        stepper.warm_up(WarmupRule(steps=1))
        done: list[int] = []
        stepper.run(40, done.append)
        backend = rendering_backend(env)
    assert done == list(range(1, 41))
    bundle = builder.build(origin())
    timing = bundle.runtime.environment_step_timing
    assert timing is not None
    assert timing.environment_step_calls == bundle.runtime.iterations_completed == 40
    assert bundle.runtime.frames == 120
    # the loop includes the steps, and choosing actions
    assert bundle.runtime.total_wall_time_s >= sum(builder.steps.seconds)
    episodes = bundle.runtime.episodes
    assert episodes is not None
    assert episodes.unfinished == 3
    if recipe.bridged:
        assert episodes.completed > 0
        assert timing.simulation_step_time_s is None
        assert backend is None
    else:
        assert timing.simulation_step_calls == 40
        assert timing.simulation_step_time_s is not None
        assert timing.task_step_time_s is not None
        split = timing.simulation_step_time_s.mean + timing.task_step_time_s.mean
        split += timing.render_step_time_s.mean if timing.render_step_time_s else 0.0
        assert split <= timing.environment_step_time_s.mean
        assert (backend == "native") == (text == "cartpole-camera")
        assert (timing.render_step_time_s.mean > 0) == (text == "cartpole-camera")  # type: ignore[union-attr]  # None would fail the test as well


# --- actions ---


def test_actions_are_in_their_space_seeded_and_fresh() -> None:
    low, high = np.array([-2.0, 0.5], np.float32), np.array([1.0, np.inf], np.float32)
    for space in (
        spaces.Box(low, high),
        spaces.Discrete(3, start=5),
        spaces.MultiDiscrete([2, 5]),
        spaces.MultiBinary(4),
    ):
        draw, again = (action_maker("random", space, 50, CPU, seed=3) for _ in range(2))
        zero = action_maker("zero", space, 50, CPU, seed=3)
        first = draw()
        assert torch.equal(first, again())
        assert not torch.equal(first, draw())
        for actions in (first, zero()):
            rows = actions.numpy().astype(space.dtype)
            assert all(space.contains(space.dtype.type(row) if row.shape == () else row) for row in rows)
        rest = zero()
        rest.fill_(9)
        assert not torch.equal(rest, zero())
    with pytest.raises(UnsupportedError, match="Box, Discrete"):
        action_maker("zero", spaces.Text(3), 2, CPU, seed=0)
