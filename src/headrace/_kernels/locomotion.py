"""The walking tasks on the CPU: their rewards, and their row functions compiled.

Sums are taken in the order of Gymnasium's, that is of numpy's. The references of the rewards in plain torch, which
other devices run, stand in ``headrace.envs.tasks.walking``; those of the row functions are the tasks themselves.
"""

from __future__ import annotations

from typing import TypeAlias

from headrace._kernels.compiled import inline, kernel
from headrace._kernels.pendulum import F64, I64, Flags, act
from headrace._rng_kernels import normal_from, start_of, uniform_from

Weights: TypeAlias = tuple[float, float, float, float]
"""Seconds per step, then the weights of speed, health and effort."""


@inline
def sum_of_squares(values: F64) -> float:
    """As ``np.sum(np.square(values))`` of up to 128 numbers: eight partial sums, pairwise, then what is left over."""
    count = values.shape[0]
    whole = count - count % 8
    # names instead of an array: nothing is allocated
    a = b = c = d = e = f = g = h = 0.0
    for i in range(0, whole, 8):
        a += values[i] * values[i]
        b += values[i + 1] * values[i + 1]
        c += values[i + 2] * values[i + 2]
        d += values[i + 3] * values[i + 3]
        e += values[i + 4] * values[i + 4]
        f += values[i + 5] * values[i + 5]
        g += values[i + 6] * values[i + 6]
        h += values[i + 7] * values[i + 7]
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for i in range(whole, count):
        total += values[i] * values[i]
    return total


@inline
def _walk_reward(
    before: float,
    after: float,
    fallen: bool,
    actions: F64,
    weights: Weights,
) -> float:
    speed = (after - before) / weights[0]
    healthy = 0.0 if fallen else weights[2]
    return (weights[1] * speed + healthy) - weights[3] * sum_of_squares(actions)


@kernel()
def walk_rewards(
    before: F64,
    after: F64,
    fallen: Flags,
    actions: F64,
    weights: Weights,
    out: F64,
) -> None:
    """Forward speed from positions ``before`` and ``after`` (n,), a bonus for those not ``fallen`` (n,), less effort.

    ``actions`` is (n, A), ``out`` (n,).
    """
    for row in range(out.shape[0]):
        out[row] = _walk_reward(before[row], after[row], fallen[row], actions[row], weights)


@inline
def _mass_center(positions: F64, mass: F64, total: float) -> float:
    weighted = 0.0
    for body in range(mass.shape[0]):
        weighted += mass[body] * positions[body, 0]
    return weighted / total


@kernel()
def mass_centers(positions: F64, mass: F64, total: float, out: F64) -> None:
    """The x of the center of mass: ``positions`` (n, bodies, 3) weighted with ``mass`` (bodies,); ``out`` is (n,)."""
    for row in range(out.shape[0]):
        out[row] = _mass_center(positions[row], mass, total)


@kernel()
def reset_walker(
    ids: I64,
    episode_ids: I64,
    keys: tuple[int, int],
    noise: float,
    normal: bool,
    qpos0: F64,
    qpos: F64,
    qvel: F64,
) -> None:
    """Noise around ``qpos0`` (nq,) for ``ids`` (m,), in the episodes ``episode_ids`` (N,); velocities may be normal."""
    for row in range(ids.shape[0]):
        env = ids[row]
        start = start_of(keys[0], episode_ids[env])
        for column in range(qpos.shape[1]):
            qpos[env, column] = qpos0[column] + uniform_from(start, column, -noise, noise - (-noise))
        start = start_of(keys[1], episode_ids[env])
        for column in range(qvel.shape[1]):
            if normal:
                qvel[env, column] = normal_from(start, column, noise)
            else:
                qvel[env, column] = uniform_from(start, column, -noise, noise - (-noise))


@kernel()
def act_ant(ids: I64, actions: F64, xpos: F64, torso: int, before: F64, ctrl: F64) -> None:
    """Remember where the torsos of ``ids`` (n,) are, and write their controls from ``actions`` (n, A)."""
    for row in range(ids.shape[0]):
        env = ids[row]
        before[env] = xpos[env, torso, 0]
    act(ids, actions, ctrl)


@kernel()
def observe_ant(ids: I64, qpos: F64, qvel: F64, obs: F64) -> None:
    """Positions without x and y, and velocities of ``ids`` (n,), side by side."""
    skipped = qpos.shape[1] - 2
    for row in range(ids.shape[0]):
        env = ids[row]
        for column in range(skipped):
            obs[row, column] = qpos[env, 2 + column]
        for column in range(qvel.shape[1]):
            obs[row, skipped + column] = qvel[env, column]


@kernel()
def judge_ant(
    ids: I64,
    actions: F64,
    qpos: F64,
    qvel: F64,
    xpos: F64,
    torso: int,
    before: F64,
    heights: tuple[float, float],
    weights: Weights,
    obs: F64,
    reward: F64,
    terminated: Flags,
) -> None:
    """Observation, reward and end of ``ids`` (n,); see :data:`Weights`."""
    observe_ant(ids, qpos, qvel, obs)
    for row in range(ids.shape[0]):
        env = ids[row]
        # written so that NaN has fallen, too
        fallen = not (heights[0] <= qpos[env, 2] <= heights[1])
        terminated[row] = fallen
        reward[row] = _walk_reward(float(before[env]), xpos[env, torso, 0], fallen, actions[row], weights)


@kernel()
def act_humanoid(ids: I64, actions: F64, xipos: F64, mass: F64, total: float, before: F64, ctrl: F64) -> None:
    """Remember where the centers of mass of ``ids`` (n,) are, and write their controls from ``actions`` (n, A)."""
    for row in range(ids.shape[0]):
        env = ids[row]
        before[env] = _mass_center(xipos[env], mass, total)
    act(ids, actions, ctrl)


@kernel()
def observe_humanoid(ids: I64, qpos: F64, qvel: F64, cinert: F64, cvel: F64, forces: F64, obs: F64) -> None:
    """What ``humanoid`` observes of ``ids`` (n,), in its order."""
    for row in range(ids.shape[0]):
        env = ids[row]
        at = 0
        for column in range(2, qpos.shape[1]):
            obs[row, at] = qpos[env, column]
            at += 1
        for column in range(qvel.shape[1]):
            obs[row, at] = qvel[env, column]
            at += 1
        for body in range(1, cinert.shape[1]):
            for column in range(cinert.shape[2]):
                obs[row, at] = cinert[env, body, column]
                at += 1
        for body in range(1, cvel.shape[1]):
            for column in range(cvel.shape[2]):
                obs[row, at] = cvel[env, body, column]
                at += 1
        for column in range(6, forces.shape[1]):
            obs[row, at] = forces[env, column]
            at += 1


@kernel()
def judge_humanoid(
    ids: I64,
    actions: F64,
    qpos: F64,
    qvel: F64,
    cinert: F64,
    cvel: F64,
    forces: F64,
    xipos: F64,
    mass: F64,
    total: float,
    before: F64,
    heights: tuple[float, float],
    weights: Weights,
    obs: F64,
    reward: F64,
    terminated: Flags,
) -> None:
    """Observation, reward and end of ``ids`` (n,); see ``judge_ant``."""
    observe_humanoid(ids, qpos, qvel, cinert, cvel, forces, obs)
    for row in range(ids.shape[0]):
        env = ids[row]
        fallen = not (heights[0] <= qpos[env, 2] <= heights[1])
        terminated[row] = fallen
        after = _mass_center(xipos[env], mass, total)
        reward[row] = _walk_reward(float(before[env]), after, fallen, actions[row], weights)
