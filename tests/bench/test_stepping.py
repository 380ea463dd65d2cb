"""The loop of runtime benchmarks: warm-up that is proven, times that add up, on tasks and bridges."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import filled, origin
from gymnasium import spaces

from headrace.bench import RuntimeBuilder
from headrace.bench._step_times import StepTimes
from headrace.bench._stepping import Stepper, WarmupRule, action_maker, warm_up
from headrace.bench._targets import (
    Target,
    check_request,
    make_target,
    parse_target,
    read_preset,
    rendering_backend,
    target_cfg,
)
from headrace.errors import ConfigError, DataError, UnknownNameError, UnsupportedError

CPU = torch.device("cpu")


# --- warm-up ---


def test_warm_up_goes_on_until_the_step_time_is_steady() -> None:
    falling = itertools.chain((1.0 / (1 + i) for i in range(100)), itertools.repeat(0.01))
    found = warm_up(lambda: next(falling), WarmupRule(steps=20))
    assert found is not None
    assert found.steady
    assert found.steps > 100, "the first hundred fall"
    last = found.block_medians_s[-3:]
    assert max(last) <= 1.05 * min(last)
    assert found.seconds > 5.0


def test_warm_up_that_never_gets_steady_says_so() -> None:
    growing = itertools.count(1.0)
    found = warm_up(lambda: next(growing) ** 3, WarmupRule(steps=20))
    assert found is not None
    assert not found.steady
    assert found.steps == 400


def test_warm_up_takes_at_least_the_steps_asked_for() -> None:
    found = warm_up(lambda: 1.0, WarmupRule(steps=200))
    assert found is not None
    assert found.steps == 200
    assert warm_up(lambda: 1.0, WarmupRule(steps=0)) is None
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
    target = parse_target(text)
    builder = RuntimeBuilder(3)
    with closing(make_target(target, target_cfg(target, {}), 3, seed=1)) as env:
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
    if target.kind == "gym":
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


# --- targets ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("antt", "did you mean 'ant'"),
        ("gym:CartPool-v1", "CartPole-v1"),
        ("no_such_module:task", "cannot be imported"),
    ],
)
def test_an_unknown_environment_is_refused_with_a_suggestion(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_target(text)


def test_a_task_of_the_users_own_is_found_in_the_folder_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.envs import _registry as registry

    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_bench_tasks.py").write_text(
        "from headrace.envs import TaskEntry, register_task\n"
        "home = 'headrace.envs.tasks.cartpole'\n"
        "register_task(TaskEntry(name='mine', task=f'{home}:Cartpole', cfg=f'{home}:CartpoleCfg', summary=''))\n"
    )
    target = parse_target("my_bench_tasks:mine")
    assert target == Target(text="my_bench_tasks:mine", kind="task", name="mine", module="my_bench_tasks")
    with pytest.raises(UnknownNameError, match="did you mean 'mine'"):
        parse_target("my_bench_tasks:mime")


def test_requests_that_cannot_work_are_refused() -> None:
    task, gym = parse_target("ant"), parse_target("gym:CartPole-v1")
    with pytest.raises(ConfigError, match="--num-envs: expected at least 1, got 0"):
        check_request(task, num_envs=0, sim="mujoco", device="cpu")
    with pytest.raises(UnknownNameError, match="did you mean 'warp'"):
        check_request(task, num_envs=1, sim="wrap", device="cpu")
    with pytest.raises(ConfigError, match="brings its own physics"):
        check_request(gym, num_envs=1, sim="warp", device="cpu")
    with pytest.raises(ConfigError, match=r"--device: expected cpu with 'gym:CartPole-v1', .*got 'cuda'"):
        check_request(gym, num_envs=1, sim="mujoco", device="cuda")


def test_a_preset_is_a_file_of_settings(tmp_path: Path) -> None:
    path = tmp_path / "quick.yaml"
    path.write_text("episode_length: 50\nrewards:\n  alive.weight: 2.0\nrange: [0, 1]\n")
    assert read_preset(path) == {"episode_length": 50, "rewards.alive.weight": 2.0, "range": [0, 1]}
    path.write_text("- a list")
    with pytest.raises(DataError, match="path: value"):
        read_preset(path)
    path.write_text("a: [")
    with pytest.raises(DataError, match="expected YAML"):
        read_preset(path)
    with pytest.raises(DataError, match="No such file"):
        read_preset(tmp_path / "none.yaml")


@pytest.mark.parametrize("renderer", ["native", "drawn_by_hand"])
def test_a_bundle_names_the_renderer_of_the_images(renderer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.sim import _camera_names

    # a camera of our own, since not every machine has another one; it draws as the native one does
    monkeypatch.setattr(_camera_names, "_CAMERAS", dict(_camera_names._CAMERAS))
    _camera_names._CAMERAS["drawn_by_hand"] = _camera_names._CAMERAS["native"]
    target = parse_target("cartpole-camera-terms")
    cfg = target_cfg(target, {"pictures.policy.renderer": renderer})
    with closing(make_target(target, cfg, 1, seed=0, threads=1)) as env:
        assert rendering_backend(env) == renderer
    with closing(make_target(parse_target("cartpole"), None, 1, seed=0, threads=1)) as env:
        assert rendering_backend(env) is None
