"""The rewards of the walking tasks on the CPU.

Sums are taken in the order of Gymnasium's, that is of numpy's. The references in plain torch, which other devices run,
stand in ``headrace.envs.tasks.walking``.
"""

from __future__ import annotations

from typing import TypeAlias

from headrace._kernels.compiled import inline, kernel
from headrace.envs.tasks._pendulum_kernels import F64, Flags

Weights: TypeAlias = tuple[float, float, float, float]
"""Seconds per step, then the weights of speed, health and effort."""


@inline
def sum_of_squares(values: F64) -> float:
    """Sum as ``np.sum(np.square(values))`` of up to 128 numbers: eight partial sums, pairwise, then the rest."""
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


@kernel()
def walk_rewards(before: F64, after: F64, fallen: Flags, actions: F64, weights: Weights, out: F64) -> None:
    """Add forward speed from positions ``before`` and ``after`` (n,), a bonus if not ``fallen`` (n,), less effort.

    ``actions`` is (n, A), ``out`` (n,).
    """
    for row in range(out.shape[0]):
        speed = (after[row] - before[row]) / weights[0]
        healthy = 0.0 if fallen[row] else weights[2]
        out[row] = (weights[1] * speed + healthy) - weights[3] * sum_of_squares(actions[row])


@kernel()
def mass_centers(positions: F64, mass: F64, total: float, out: F64) -> None:
    """Compute the x (n,) of centers of mass: ``positions`` (n, bodies, 3) weighted with ``mass`` (bodies,)."""
    for row in range(out.shape[0]):
        weighted = 0.0
        for body in range(mass.shape[0]):
            weighted += mass[body] * positions[row, body, 0]
        out[row] = weighted / total
