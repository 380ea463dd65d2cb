"""The row functions of ``inverted-pendulum`` and ``cartpole``, compiled; the references are the tasks themselves."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import kernel
from headrace._rng_kernels import start_of, uniform_from

F64: TypeAlias = NDArray[np.float64]
I64: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


@kernel()
def act(ids: I64, actions: F64, ctrl: F64) -> None:
    """Write the controls of ``ids`` (n,), ``ctrl`` (N, A), from ``actions`` (n, A)."""
    for row in range(ids.shape[0]):
        for column in range(actions.shape[1]):
            ctrl[ids[row], column] = actions[row, column]


@kernel()
def observe(ids: I64, qpos: F64, qvel: F64, obs: F64) -> None:
    """Write positions and velocities of ``ids`` (n,), side by side: ``obs`` is (n, nq + nv)."""
    for row in range(ids.shape[0]):
        env = ids[row]
        for column in range(qpos.shape[1]):
            obs[row, column] = qpos[env, column]
        for column in range(qvel.shape[1]):
            obs[row, qpos.shape[1] + column] = qvel[env, column]


@kernel()
def judge_pendulum(
    ids: I64, qpos: F64, qvel: F64, max_angle: float, obs: F64, reward: F64, terminated: Flags, success: Flags
) -> None:
    """Write observation, reward, end and success of ``ids`` (n,)."""
    observe(ids, qpos, qvel, obs)
    for row in range(ids.shape[0]):
        down = abs(qpos[ids[row], 1]) > max_angle
        terminated[row] = down
        success[row] = not down
        reward[row] = 0.0 if down else 1.0


@kernel()
def reset_pendulum(ids: I64, episode_ids: I64, key: int, noise: float, qpos: F64, qvel: F64) -> None:
    """Set uniform noise on positions and velocities of ``ids`` (m,), in the episodes ``episode_ids`` (N,)."""
    for row in range(ids.shape[0]):
        env = ids[row]
        start = start_of(key, episode_ids[env])
        for column in range(2):
            qpos[env, column] = uniform_from(start, column, -noise, noise - (-noise))
            qvel[env, column] = uniform_from(start, 2 + column, -noise, noise - (-noise))


@kernel()
def judge_cartpole(
    ids: I64,
    qpos: F64,
    qvel: F64,
    limits: tuple[float, float],
    weights: tuple[float, float, float],
    obs: F64,
    reward: F64,
    terminated: Flags,
    success: Flags,
) -> None:
    """Write observation, reward, end and success of ``ids`` (n,).

    ``limits`` are of position and angle, ``weights`` those of being alive, of the angle and of the position.
    """
    observe(ids, qpos, qvel, obs)
    for row in range(ids.shape[0]):
        position, angle = qpos[ids[row], 0], qpos[ids[row], 1]
        over = abs(position) > limits[0] or abs(angle) > limits[1]
        terminated[row] = over
        success[row] = not over
        lean, stray = weights[1] * (angle * angle), weights[2] * (position * position)
        reward[row] = (weights[0] + lean) + stray


@kernel()
def reset_cartpole(
    ids: I64, episode_ids: I64, key: int, scale: tuple[float, float], velocity: float, qpos: F64, qvel: F64
) -> None:
    """Random starts of ``ids`` (m,), in the episodes ``episode_ids`` (N,)."""
    for row in range(ids.shape[0]):
        env = ids[row]
        start = start_of(key, episode_ids[env])
        for column in range(2):
            qpos[env, column] = uniform_from(start, column, -1.0, 2.0) * scale[column]
            qvel[env, column] = uniform_from(start, 2 + column, -1.0, 2.0) * velocity
