"""Our tasks against the genuine Gymnasium environments, step by step from the same states with the same actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mujoco
import numpy as np
import pytest
import torch
from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.envs.mujoco.ant_v5 import AntEnv
from gymnasium.envs.mujoco.humanoid_v5 import HumanoidEnv
from gymnasium.envs.mujoco.inverted_pendulum_v5 import InvertedPendulumEnv
from gymnasium.envs.mujoco.pusher_v5 import PusherEnv

from headrace.envs.batch_env import BatchEnv
from headrace.envs.registry import make
from headrace.envs.task import Rows

_ENVS = 6
_STEPS = 220
_ULP = 2.0**-52


@dataclass(frozen=True)
class Pair:
    """One of our tasks and the environment that it must equal."""

    task: str
    genuine: Callable[[], MujocoEnv]
    reward_tolerance: float
    """Absolute. Zero where sums are taken in Gymnasium's order; see each pair for why it is not zero elsewhere."""
    terminates: bool = True


PAIRS = (
    Pair("inverted-pendulum", InvertedPendulumEnv, reward_tolerance=0.0),
    Pair("ant", lambda: AntEnv(include_cfrc_ext_in_observation=False, contact_cost_weight=0.0), reward_tolerance=0.0),
    Pair(
        "humanoid",
        lambda: HumanoidEnv(include_cfrc_ext_in_observation=False, contact_cost_weight=0.0),
        reward_tolerance=0.0,
    ),
    # two norms of three numbers and a sum of seven squares (each at most 4, weighed 0.1): two ulps of their size
    Pair("pusher", PusherEnv, reward_tolerance=2 * 4 * _ULP, terminates=False),
)
_IDS = [pair.task for pair in PAIRS]


def now(env: BatchEnv) -> Rows:
    """All environments as the functions of a task see them."""
    return env.rows()


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy()


def start_like(env: BatchEnv, i: int, genuine: MujocoEnv) -> None:
    """Put a genuine environment into the initial state of environment ``i``, as its own reset would."""
    mujoco.mj_resetData(genuine.model, genuine.data)
    rows = now(env)
    genuine.set_state(numbers(rows.get("qpos"))[i], numbers(rows.get("qvel"))[i])


@pytest.mark.parametrize("pair", PAIRS, ids=_IDS)
def test_every_step_equals_the_genuine_environment_through_terminations(pair: Pair) -> None:
    env = make(pair.task, _ENVS, seed=11, threads=2, autoreset="disabled")
    env.reset()
    others = [pair.genuine() for _ in range(_ENVS)]
    for i, other in enumerate(others):
        start_like(env, i, other)
    random = np.random.default_rng(5)
    low, high = env.single_action_space.low, env.single_action_space.high
    terminations = truncations = 0

    for at in range(_STEPS):
        actions = random.uniform(low, high, (_ENVS, len(low)))
        step = env.step(torch.from_numpy(actions))
        rows = now(env)
        obs = numbers(env.task.observe(rows)["policy"])
        reward = numbers(env.task.reward(rows, torch.from_numpy(actions)))
        for i, other in enumerate(others):
            expected_obs, expected_reward, expected_end, _, _ = other.step(actions[i])
            where = f"{pair.task}, environment {i}, step {at}"
            np.testing.assert_array_equal(obs[i], expected_obs, err_msg=where)
            np.testing.assert_array_equal(numbers(rows.get("qpos"))[i], other.data.qpos, err_msg=where)
            np.testing.assert_array_equal(numbers(rows.get("qvel"))[i], other.data.qvel, err_msg=where)
            np.testing.assert_allclose(reward[i], expected_reward, rtol=0.0, atol=pair.reward_tolerance, err_msg=where)
            assert bool(step.terminated[i]) == bool(expected_end), where
        # what step() returned is the same, rounded once
        np.testing.assert_array_equal(step.obs["policy"].numpy(), obs.astype(np.float32))
        np.testing.assert_array_equal(step.reward.numpy(), reward.astype(np.float32))

        ended = step.terminated | step.truncated
        terminations += int(step.terminated.sum())
        truncations += int(step.truncated.sum())
        if bool(ended.any()):
            env.reset(options={"reset_mask": ended})
            first = numbers(env.task.observe(now(env))["policy"])
            for i in ended.nonzero().squeeze(1).tolist():
                start_like(env, i, others[i])
                np.testing.assert_array_equal(first[i], others[i]._get_obs())

    assert (terminations > 0) == pair.terminates
    assert (truncations > 0) == (pair.task == "pusher")  # 100 steps; the others' 1,000 are not reached


@pytest.mark.parametrize("pair", PAIRS, ids=_IDS)
def test_spaces_time_step_and_episode_length_equal_the_genuine_ones(pair: Pair) -> None:
    env, other = make(pair.task), pair.genuine()
    assert env.single_action_space == other.action_space
    assert env.single_observation_space["policy"].shape == other.observation_space.shape
    assert env.task.dt == other.dt
    assert env.task.cfg.episode_length == {"pusher": 100}.get(pair.task, 1000)


_OURS, _THEIRS = 32768, 16384
# Smirnov's two-sample bound for these sizes at a level of 1e-6, so that 100 coordinates together fail by chance less
# than once in 10,000 choices of seeds: sqrt(-ln(1e-6 / 2) / 2) · sqrt((n + m) / (n·m)) = 0.026
_KS_BOUND = np.sqrt(-np.log(1e-6 / 2) / 2) * np.sqrt((_OURS + _THEIRS) / (_OURS * _THEIRS))


def kolmogorov_smirnov(a: np.ndarray, b: np.ndarray) -> float:
    """The largest distance between the two empirical distribution functions."""
    points = np.sort(np.concatenate((a, b)))
    below_a = np.searchsorted(np.sort(a), points, side="right") / len(a)
    below_b = np.searchsorted(np.sort(b), points, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


@pytest.mark.parametrize("pair", PAIRS, ids=_IDS)
def test_initial_states_are_distributed_like_the_genuine_ones(pair: Pair) -> None:
    env = make(pair.task, _OURS, seed=2)
    env.reset()
    ours = np.concatenate((numbers(now(env).get("qpos")), numbers(now(env).get("qvel"))), axis=1)
    other = pair.genuine()
    other.reset(seed=7)
    theirs = np.empty((_THEIRS, ours.shape[1]))
    for row in theirs:
        # reset_model draws what reset() draws, without the bookkeeping around it
        other.reset_model()
        row[:] = np.concatenate((other.data.qpos, other.data.qvel))

    for column in range(ours.shape[1]):
        a, b = ours[:, column], theirs[:, column]
        name = f"{pair.task}, coordinate {column}"
        if b.std() == 0.0:
            np.testing.assert_array_equal(a, b[0], err_msg=name)
            continue
        assert kolmogorov_smirnov(a, b) < _KS_BOUND, name
        # 6 standard errors of a difference of means
        assert abs(a.mean() - b.mean()) < 6 * b.std() * np.sqrt(1 / _OURS + 1 / _THEIRS), name
        # the standard error of a standard deviation is at most std/sqrt(2n) for distributions no heavier than normal
        assert abs(a.std() / b.std() - 1.0) < 6 * np.sqrt(0.5 / _OURS + 0.5 / _THEIRS), name

    # coordinates are drawn independently of each other, as theirs are (the object's place on pusher's table is not:
    # it keeps clear of the goal, and there both must agree): 6 standard errors of a difference of correlations
    varying = theirs.std(axis=0) > 0
    difference = np.corrcoef(ours[:, varying].T) - np.corrcoef(theirs[:, varying].T)
    assert np.abs(difference).max() < 6 * np.sqrt(1 / _OURS + 1 / _THEIRS)


@pytest.mark.parametrize("pair", PAIRS, ids=_IDS)
def test_initial_states_have_the_support_of_the_genuine_ones(pair: Pair) -> None:
    env = make(pair.task, _OURS, seed=4)
    env.reset()
    nominal = numbers(torch.from_numpy(env.task.model.qpos0.copy()))
    qpos, qvel = numbers(now(env).get("qpos")) - nominal, numbers(now(env).get("qvel"))
    if pair.task == "pusher":
        assert (np.abs(qpos[:, :7]) == 0.0).all()
        assert ((qpos[:, 7] >= -0.3) & (qpos[:, 7] < 0.0)).all()
        assert ((qpos[:, 8] >= -0.2) & (qpos[:, 8] < 0.2)).all()
        assert (np.linalg.norm(qpos[:, 7:9], axis=1) > 0.17).all()
        assert (qpos[:, 9:] == 0.0).all()
        assert 0.0049 < np.abs(qvel[:, :7]).max() <= 0.005
        assert (qvel[:, 7:] == 0.0).all()
        return
    bound = {"inverted-pendulum": 0.01, "ant": 0.1, "humanoid": 0.01}[pair.task]
    # of 32768 · nq uniform draws the largest is within 1 % of the bound (missed with a chance of 0.99^65536)
    assert 0.99 * bound < np.abs(qpos).max() <= bound * (1 + 4 * _ULP) + 2 * _ULP
    if pair.task != "ant":  # whose velocities are normal
        assert 0.99 * bound < np.abs(qvel).max() <= bound
