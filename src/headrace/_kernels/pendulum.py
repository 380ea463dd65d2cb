"""The row functions of ``inverted-pendulum``, compiled; the reference is the task itself."""

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
    """Positions and velocities of ``ids`` (n,), side by side: ``obs`` is (n, nq + nv)."""
    for row in range(ids.shape[0]):
        env = ids[row]
        for column in range(qpos.shape[1]):
            obs[row, column] = qpos[env, column]
        for column in range(qvel.shape[1]):
            obs[row, qpos.shape[1] + column] = qvel[env, column]


@kernel()
def judge(
    ids: I64, qpos: F64, qvel: F64, max_angle: float, obs: F64, reward: F64, terminated: Flags, success: Flags
) -> None:
    """Observation, reward, end and success of ``ids`` (n,)."""
    observe(ids, qpos, qvel, obs)
    for row in range(ids.shape[0]):
        down = abs(qpos[ids[row], 1]) > max_angle
        terminated[row] = down
        success[row] = not down
        reward[row] = 0.0 if down else 1.0


@kernel()
def reset(ids: I64, episode_ids: I64, key: int, noise: float, qpos: F64, qvel: F64) -> None:
    """Uniform noise on the positions and velocities of ``ids`` (m,), in the episodes ``episode_ids`` (N,)."""
    for row in range(ids.shape[0]):
        env = ids[row]
        start = start_of(key, episode_ids[env])
        for column in range(2):
            qpos[env, column] = uniform_from(start, column, -noise, noise - (-noise))
            qvel[env, column] = uniform_from(start, 2 + column, -noise, noise - (-noise))
