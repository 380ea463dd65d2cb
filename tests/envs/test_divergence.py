"""A simulation that fails ends one episode, is reported, and its neighbors do not notice."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

import headrace
from headrace.envs.batch_env import BatchEnv
from headrace.envs.registry import make_task, task_names
from headrace.testing._contract import draw_actions, next_actions, require_rows_equal

N, BAD = 5, 2
PHYSICS_TASKS = [name for name in task_names() if "camera" not in name]


def make(task: str, **kwargs: object) -> BatchEnv:
    return headrace.make(task, N, seed=4, threads=2, **kwargs)


def break_physics(env: BatchEnv, value: float = 1e20) -> None:
    env.sim.field("qvel")[BAD] = value


def require_same_neighbors(env: BatchEnv, twin: BatchEnv, step, expected, when: str) -> None:
    others = torch.tensor([i for i in range(N) if i != BAD])
    for name, values in expected.obs.items():
        require_rows_equal(step.obs[name], values, others, when, f"obs[{name!r}]")
    for field in ("reward", "terminated", "truncated"):
        require_rows_equal(getattr(step, field), getattr(expected, field), others, when, field)
    require_rows_equal(env.sim.states(None), twin.sim.states(None), others, when, "physics state")
    require_rows_equal(env.episode_ids, twin.episode_ids, others, when, "episode_ids")


@pytest.mark.parametrize("task", task_names())
@pytest.mark.parametrize("value", [1e20, float("nan"), float("inf")])
def test_a_diverged_env_is_reset_alone_and_reported(task, value) -> None:
    env, twin = make(task), make(task)
    env.reset()
    twin.reset()
    for _ in range(3):
        env.step(next_actions(env))
        twin.step(next_actions(twin))
    # only the failing step can end an episode: pushers and pendulums have not fallen after three steps
    assert env.episode_steps.tolist() == [3] * N
    last = env.observe([BAD])
    returns = float(env._episodes.returns[BAD])
    break_physics(env, value)
    step, expected = env.step(next_actions(env)), twin.step(next_actions(twin))
    assert float(step.reward[BAD]) == 0.0
    assert (bool(step.terminated[BAD]), bool(step.truncated[BAD])) == (False, True)
    for name, values in last.items():
        assert torch.equal(step.info["final_obs"][name][BAD], values[0])
        assert bool(torch.isfinite(step.obs[name].float()).all())
    ends = step.info["ends"]
    row = ends.env_ids.tolist().index(BAD)
    assert bool(ends.diverged[row])
    assert int(ends.diverged.sum()) == 1
    assert (int(ends.episode_ids[row]), int(ends.lengths[row])) == (BAD, 4)
    assert float(ends.returns[row]) == returns
    assert ends.success is None or not bool(ends.success[row])
    assert env.divergences == 1
    assert int(env.episode_ids[BAD]) == BAD + N
    assert int(env.episode_steps[BAD]) == 0
    require_same_neighbors(env, twin, step, expected, "the failing step")
    for count in range(5):
        step, expected = env.step(next_actions(env)), twin.step(next_actions(twin))
        require_same_neighbors(env, twin, step, expected, f"step {count} after the failing one")
    assert env.divergences == 1


def test_the_episode_that_follows_a_divergence_is_the_one_that_would_have_followed_anyhow() -> None:
    env, fresh = make("ant"), make("ant")
    env.reset()
    break_physics(env)
    step = env.step(next_actions(env))
    obs, _ = fresh.reset(options={"episode_ids": env.episode_ids})
    for _ in range(3):
        assert torch.equal(step.obs["policy"][BAD], obs["policy"][BAD])
        step = env.step(draw_actions(env, env.episode_ids, env.episode_steps))
        obs = fresh.step(draw_actions(fresh, fresh.episode_ids, fresh.episode_steps)).obs


def test_a_diverged_env_parks_where_autoreset_is_disabled() -> None:
    env, twin = make("ant", autoreset="disabled"), make("ant", autoreset="disabled")
    env.reset()
    twin.reset()
    env.step(next_actions(env))
    twin.step(next_actions(twin))
    last = env.observe([BAD])["policy"][0]
    break_physics(env)
    step, expected = env.step(next_actions(env)), twin.step(next_actions(twin))
    assert torch.equal(step.obs["policy"][BAD], last)
    assert step.info["ends"].diverged.tolist() == [True]
    assert env.active.tolist() == [True, True, False, True, True]
    for count in range(3):
        require_same_neighbors(env, twin, step, expected, f"step {count}")
        step, expected = env.step(next_actions(env)), twin.step(next_actions(twin))
        assert torch.equal(step.obs["policy"][BAD], last)
    env.reset(options={"reset_mask": ~env.active})
    step = env.step(next_actions(env))
    assert "ends" not in step.info
    assert int(env.episode_steps[BAD]) == 1


def test_a_suspended_env_does_not_notice_a_neighbors_divergence() -> None:
    env = make("ant")
    env.reset()
    env.step(next_actions(env))
    env.suspend([0, 3])
    state, held = env.sim.states(None), env.observe()
    break_physics(env)
    env.step(next_actions(env))
    rows = torch.tensor([0, 3])
    require_rows_equal(env.sim.states(None), state, rows, "a neighbor's divergence", "physics state")
    require_rows_equal(env.observe()["policy"], held["policy"], rows, "a neighbor's divergence", "obs")


def test_a_suspended_env_with_a_broken_state_is_reported_when_it_acts_again() -> None:
    env = make("ant")
    env.reset()
    env.suspend([BAD])
    break_physics(env)
    assert "ends" not in env.step(next_actions(env)).info
    env.resume([BAD])
    assert env.step(next_actions(env)).info["ends"].env_ids.tolist() == [BAD]


def test_several_can_diverge_at_once_even_all() -> None:
    env = make("ant")
    env.reset()
    env.sim.field("qvel")[:] = 1e20
    step = env.step(next_actions(env))
    assert step.info["ends"].diverged.tolist() == [True] * N
    assert step.truncated.all()
    assert env.divergences == N
    assert "ends" not in env.step(next_actions(env)).info


def test_numbers_that_cancel_each_other_are_found_all_the_same() -> None:
    env = make("cartpole", overrides={"max_position": 1e300, "position_weight": 0.0})
    env.reset()
    qpos = env.sim.field("qpos")
    observe = env.task.observe
    sign = torch.ones(N, dtype=torch.float64)
    sign[0], sign[1] = 1e39, -1e39
    env.task.observe = lambda rows: {"policy": torch.cat((sign[rows.ids][:, None], observe(rows)["policy"][:, 1:]), 1)}
    qpos.zero_()
    step = env.step(torch.zeros(N, 1))
    assert step.truncated.nonzero().squeeze(1).tolist() == [0, 1]
    assert torch.isfinite(step.info["final_obs"]["policy"]).all()


def test_an_action_whose_reward_no_float32_can_hold_ends_that_episode_only() -> None:
    env = make("ant")
    env.reset()
    actions = next_actions(env)
    actions[BAD] = 1e30
    step = env.step(actions)
    assert step.info["ends"].env_ids.tolist() == [BAD]
    assert step.info["ends"].diverged.tolist() == [True]
    assert float(step.reward[BAD]) == 0.0


def test_no_log_file_is_written(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = make("ant")
    env.reset()
    break_physics(env)
    env.step(next_actions(env))
    assert os.listdir(tmp_path) == []


def run_at_random(task: str, num_envs: int, steps: int) -> list[int]:
    """Resident memory in bytes after each tenth of the run; fails on a number that is not finite."""
    env = headrace.make(task, num_envs, seed=0, threads=2)
    env.reset()
    gc.freeze()  # what other tests and imports left: looking through it takes half a second each time
    process, memory = psutil.Process(), []
    for count in range(1, steps + 1):
        step = env.step(next_actions(env))
        finite = [torch.isfinite(values).all() for values in step.obs.values() if values.is_floating_point()]
        finite += [torch.isfinite(values).all() for values in step.info.get("final_obs", {}).values()]
        assert all(bool(flag) for flag in finite), f"{task}: not finite at step {count}"
        assert math.isfinite(float(step.reward.sum()))
        if count % (steps // 10) == 0:
            # a step in which an episode ended holds one observation more than others
            del step
            gc.collect()
            memory.append(process.memory_info().rss)
    env.close()
    gc.unfreeze()
    return memory


@pytest.mark.parametrize("task", PHYSICS_TASKS)
def test_random_actions_give_finite_numbers_and_flat_memory_briefly(task) -> None:
    # a picture is a thousand times larger than a state: fewer show the same leak
    memory = run_at_random(task, 8 if make_task(task).images else 32, 100)
    # catches a gross leak only (a copy of all states or models a step); the long form catches one observation a step
    assert memory[-1] - memory[2] < 8 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("task", task_names())
def test_random_actions_give_finite_numbers_and_flat_memory(task) -> None:
    # in a process of its own: the allocator of one that has run other tests keeps or frees their blocks meanwhile
    program = "import sys, test_divergence; print(*test_divergence.run_at_random(sys.argv[1], 256, 1000))"
    command = [sys.executable, "-c", program, task]
    # glibc raises this threshold as it goes and keeps freed pictures in its heap: held at 64 kB they go back at once
    quick_to_free = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    here = Path(__file__).parent
    done = subprocess.run(command, cwd=here, env=quick_to_free, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    memory = [int(number) for number in done.stdout.split()]
    # from the second tenth on, 800 steps of 256 envs: a leak of one observation a step would be 3 MB for the pendulum
    assert memory[-1] - memory[1] < 3 * 2**20, memory
