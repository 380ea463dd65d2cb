"""Rewards of the walking tasks in one pass on the CPU: what would be fifteen small torch operations.

The sums are taken in the order of Gymnasium's, that is of numpy's. The references in plain torch, which other devices
run, stand in ``headrace.envs.tasks.walking``.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import inline, kernel

F64: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]


@inline
def sum_of_squares(values: F64) -> float:
    """As ``np.sum(np.square(values))`` of up to 128 numbers: eight partial sums, pairwise, then what is left over."""
    count = values.shape[0]
    whole = count - count % 8
    total = 0.0
    if whole:
        parts = np.zeros(8)
        for i in range(whole):
            parts[i % 8] += values[i] * values[i]
        total = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]))
    for i in range(whole, count):
        total += values[i] * values[i]
    return total


@kernel()
def walk_rewards(
    before: F64,
    after: F64,
    fallen: Flags,
    actions: F64,
    dt: float,
    forward_weight: float,
    healthy_reward: float,
    effort_weight: float,
    out: F64,
) -> None:
    """Forward speed from positions ``before`` and ``after`` (n,), a bonus for those not ``fallen`` (n,), less effort.

    ``actions`` is (n, A), ``out`` (n,).
    """
    for row in range(out.shape[0]):
        speed = (after[row] - before[row]) / dt
        healthy = 0.0 if fallen[row] else healthy_reward
        out[row] = (forward_weight * speed + healthy) - effort_weight * sum_of_squares(actions[row])


@kernel()
def mass_centers(positions: F64, mass: F64, total: float, out: F64) -> None:
    """The x of the center of mass: ``positions`` (n, bodies, 3) weighted with ``mass`` (bodies,); ``out`` is (n,)."""
    for row in range(out.shape[0]):
        weighted = 0.0
        for body in range(mass.shape[0]):
            weighted += mass[body] * positions[row, body, 0]
        out[row] = weighted / total
