"""The row functions of ``cartpole``, compiled; the reference is the task itself."""

from __future__ import annotations

from headrace._kernels.compiled import kernel
from headrace._kernels.pendulum import F64, I64, Flags, observe
from headrace._rng_kernels import start_of, uniform_from


@kernel()
def judge(
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
    """Observation, reward, end and success of ``ids`` (n,).

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
def reset(
    ids: I64, episode_ids: I64, key: int, scale: tuple[float, float], velocity: float, qpos: F64, qvel: F64
) -> None:
    """Random starts of ``ids`` (m,), in the episodes ``episode_ids`` (N,)."""
    for row in range(ids.shape[0]):
        env = ids[row]
        start = start_of(key, episode_ids[env])
        for column in range(2):
            qpos[env, column] = uniform_from(start, column, -1.0, 2.0) * scale[column]
            qvel[env, column] = uniform_from(start, 2 + column, -1.0, 2.0) * velocity
