"""V-trace on the CPU, in the form and with the arrays of :mod:`headrace._kernels.returns_numba`."""

from __future__ import annotations

import numpy as np

from headrace._kernels.compiled import kernel
from headrace._kernels.returns_numba import Flags, Floats, Number


@kernel()
def _vtrace_advantage_row(
    reward: Floats,
    value: Floats,
    next_value: Floats,
    terminated: Flags,
    truncated: Flags,
    active: Flags,
    ratio: Floats,
    gamma: Number,
    rho_clip: Number,
    carry: Floats,
    advantage: Floats,
) -> None:
    zero = gamma - gamma
    for n in range(carry.shape[0]):
        bootstrap = zero if terminated[n] else next_value[n]
        following = zero if terminated[n] | truncated[n] else carry[n]
        rho = min(ratio[n], rho_clip)
        advantage[n] = rho * (reward[n] + gamma * (bootstrap + following) - value[n]) if active[n] else zero


@kernel()
def _vtrace_row(
    reward: Floats,
    value: Floats,
    next_value: Floats,
    terminated: Flags,
    truncated: Flags,
    active: Flags,
    ratio: Floats,
    gamma: Number,
    rho_clip: Number,
    c_clip: Number,
    carry: Floats,
) -> None:
    """carry ← v_t − V_t, from carry = v_{t+1} − V_{t+1}."""
    zero = gamma - gamma
    for n in range(carry.shape[0]):
        bootstrap = zero if terminated[n] else next_value[n]
        following = zero if terminated[n] | truncated[n] else carry[n]
        delta = min(ratio[n], rho_clip) * (reward[n] + gamma * bootstrap - value[n])
        correction = delta + gamma * min(ratio[n], c_clip) * following
        carry[n] = correction if active[n] else carry[n]


@kernel()
def _write_target(carry: Floats, value: Floats, active: Flags, value_target: Floats) -> None:
    zero = carry.dtype.type(0)
    for n in range(carry.shape[0]):
        value_target[n] = carry[n] + value[n] if active[n] else zero


@kernel()
def vtrace(
    lo: int,
    hi: int,
    reward: Floats,
    value: Floats,
    next_value: Floats,
    terminated: Flags,
    truncated: Flags,
    active: Flags,
    active_step: int,
    ratio: Floats,
    gamma: Number,
    rho_clip: Number,
    c_clip: Number,
    advantage: Floats,
    value_target: Floats,
) -> None:
    """Write V-trace into ``advantage`` and ``value_target``."""
    steps = reward.shape[0]
    carry = np.zeros(hi - lo, dtype=reward.dtype)
    for back in range(steps):
        t = steps - 1 - back
        live = active[t * active_step, lo:hi]
        rewards, values, next_values = reward[t, lo:hi], value[t, lo:hi], next_value[t, lo:hi]
        term, trunc, ratios = terminated[t, lo:hi], truncated[t, lo:hi], ratio[t, lo:hi]
        _vtrace_advantage_row(
            rewards, values, next_values, term, trunc, live, ratios, gamma, rho_clip, carry, advantage[t, lo:hi]
        )
        _vtrace_row(rewards, values, next_values, term, trunc, live, ratios, gamma, rho_clip, c_clip, carry)
        _write_target(carry, values, live, value_target[t, lo:hi])
