"""The return recursions in Warp, for CUDA: a thread an environment, backwards in time.

Neighboring threads read neighboring addresses of a time-major array, so loads coalesce. The kernels are generic in
the float dtype. They also run on Warp's CPU device, which is how they are tested.
"""

# Warp reads the annotations as types of its own language, which no type checker knows:
# pyright: reportInvalidTypeForm=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import warp as wp


@wp.kernel
def gae(
    # inputs
    reward: wp.array2d(dtype=Any),
    value: wp.array2d(dtype=Any),
    next_value: wp.array2d(dtype=Any),
    terminated: wp.array2d(dtype=wp.bool),
    truncated: wp.array2d(dtype=wp.bool),
    active: wp.array2d(dtype=wp.bool),
    active_step: int,
    gamma: Any,
    lam: Any,
    # outputs
    advantage: wp.array2d(dtype=Any),
    value_target: wp.array2d(dtype=Any),
):
    """Write GAE, (T, N). ``active`` is (1, N) with ``active_step`` 0 where every step counts; launch N threads."""
    n = wp.tid()
    steps = reward.shape[0]
    zero = gamma - gamma
    carry = gamma - gamma
    for back in range(steps):
        t = steps - 1 - back
        if active[t * active_step, n]:
            following = carry
            bootstrap = next_value[t, n]
            if terminated[t, n]:
                bootstrap = zero
                following = zero
            if truncated[t, n]:
                following = zero
            carry = reward[t, n] + gamma * bootstrap - value[t, n] + gamma * lam * following
            advantage[t, n] = carry
            value_target[t, n] = carry + value[t, n]
        else:
            advantage[t, n] = zero
            value_target[t, n] = zero


@wp.kernel
def td_lambda(
    # inputs
    reward: wp.array2d(dtype=Any),
    value: wp.array2d(dtype=Any),
    next_value: wp.array2d(dtype=Any),
    terminated: wp.array2d(dtype=wp.bool),
    truncated: wp.array2d(dtype=wp.bool),
    active: wp.array2d(dtype=wp.bool),
    active_step: int,
    gamma: Any,
    lam: Any,
    # outputs
    advantage: wp.array2d(dtype=Any),
    value_target: wp.array2d(dtype=Any),
):
    """Write TD(λ) returns; launch N threads."""
    n = wp.tid()
    steps = reward.shape[0]
    zero = gamma - gamma
    carry = gamma - gamma
    one = wp.exp(gamma - gamma)
    followers = n - n  # a variable: Warp takes a literal for a constant
    for back in range(steps):
        t = steps - 1 - back
        if active[t * active_step, n]:
            following = carry
            if truncated[t, n] or followers == 0:
                following = next_value[t, n]
            elif lam != one:
                following = (one - lam) * next_value[t, n] + lam * carry
            if terminated[t, n]:
                following = zero
            carry = reward[t, n] + gamma * following
            followers = followers + 1
            advantage[t, n] = carry - value[t, n]
            value_target[t, n] = carry
        else:
            advantage[t, n] = zero
            value_target[t, n] = zero


@wp.kernel
def n_step(
    # inputs
    reward: wp.array2d(dtype=Any),
    value: wp.array2d(dtype=Any),
    next_value: wp.array2d(dtype=Any),
    terminated: wp.array2d(dtype=wp.bool),
    truncated: wp.array2d(dtype=wp.bool),
    active: wp.array2d(dtype=wp.bool),
    active_step: int,
    gamma: Any,
    horizon: int,
    # outputs
    advantage: wp.array2d(dtype=Any),
    value_target: wp.array2d(dtype=Any),
):
    """Write n-step returns; launch (T, N) threads, each of which walks forward over its own window."""
    t, n = wp.tid()
    steps = reward.shape[0]
    zero = gamma - gamma
    if not active[t * active_step, n]:
        advantage[t, n] = zero
        value_target[t, n] = zero
        return
    total = gamma - gamma
    discount = wp.exp(gamma - gamma)
    bootstrap = gamma - gamma
    taken = t - t
    s = int(t)
    while s < steps and taken < horizon:
        if active[s * active_step, n]:
            total = total + discount * reward[s, n]
            discount = discount * gamma
            bootstrap = next_value[s, n]
            taken = taken + 1
            if terminated[s, n]:
                bootstrap = zero
                taken = horizon
            if truncated[s, n]:
                taken = horizon
        s = s + 1
    total = total + discount * bootstrap
    advantage[t, n] = total - value[t, n]
    value_target[t, n] = total


@wp.kernel
def vtrace(
    # inputs
    reward: wp.array2d(dtype=Any),
    value: wp.array2d(dtype=Any),
    next_value: wp.array2d(dtype=Any),
    terminated: wp.array2d(dtype=wp.bool),
    truncated: wp.array2d(dtype=wp.bool),
    active: wp.array2d(dtype=wp.bool),
    active_step: int,
    ratio: wp.array2d(dtype=Any),
    gamma: Any,
    rho_clip: Any,
    c_clip: Any,
    # outputs
    advantage: wp.array2d(dtype=Any),
    value_target: wp.array2d(dtype=Any),
):
    """Write V-trace; launch N threads."""
    n = wp.tid()
    steps = reward.shape[0]
    zero = gamma - gamma
    carry = gamma - gamma
    for back in range(steps):
        t = steps - 1 - back
        if active[t * active_step, n]:
            following = carry
            bootstrap = next_value[t, n]
            if terminated[t, n]:
                bootstrap = zero
                following = zero
            if truncated[t, n]:
                following = zero
            rho = wp.min(ratio[t, n], rho_clip)
            c = wp.min(ratio[t, n], c_clip)
            advantage[t, n] = rho * (reward[t, n] + gamma * (bootstrap + following) - value[t, n])
            carry = rho * (reward[t, n] + gamma * bootstrap - value[t, n]) + gamma * c * following
            value_target[t, n] = carry + value[t, n]
        else:
            advantage[t, n] = zero
            value_target[t, n] = zero
