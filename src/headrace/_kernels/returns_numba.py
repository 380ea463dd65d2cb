"""The return recursions on the CPU: one pass over the bytes, backwards in time.

A kernel's rows are environments, lo to hi; :func:`headrace._kernels.compiled.run` shares them out.

Each row of a block is worked in short loops over few arrays. One loop over all of them would read better, but LLVM
vectorizes a loop only where it can show with eight comparisons that its arrays do not overlap.

Arrays are C-contiguous (T, N). ``active`` is (T, N), or (1, N) with ``active_step`` 0 where every step counts. Numbers
(``gamma``, …) come in the arrays' dtype, so that float32 stays float32.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import kernel

Floats: TypeAlias = NDArray[np.floating[Any]]
Flags: TypeAlias = NDArray[np.bool_]
Number: TypeAlias = Any  # a numpy scalar of the arrays' dtype


@kernel()
def _gae_row(
    reward: Floats,
    value: Floats,
    next_value: Floats,
    terminated: Flags,
    truncated: Flags,
    active: Flags,
    gamma: Number,
    decay: Number,
    carry: Floats,
) -> None:
    """carry ← A_t, from carry = A_{t+1}; environments that are not active keep theirs."""
    zero = gamma - gamma
    for n in range(carry.shape[0]):
        bootstrap = zero if terminated[n] else next_value[n]
        following = zero if terminated[n] | truncated[n] else carry[n]
        advantage = reward[n] + gamma * bootstrap - value[n] + decay * following
        carry[n] = advantage if active[n] else carry[n]


@kernel()
def _write_advantage(carry: Floats, value: Floats, active: Flags, advantage: Floats, value_target: Floats) -> None:
    zero = carry.dtype.type(0)
    for n in range(carry.shape[0]):
        advantage[n] = carry[n] if active[n] else zero
        value_target[n] = carry[n] + value[n] if active[n] else zero


@kernel()
def _gae_row_awake(
    reward: Floats,
    value: Floats,
    next_value: Floats,
    terminated: Flags,
    truncated: Flags,
    gamma: Number,
    decay: Number,
    following: Floats,
    advantage: Floats,
) -> None:
    """A_t of a row in which every step counts, from ``following`` = A_{t+1}."""
    zero = gamma - gamma
    for n in range(advantage.shape[0]):
        bootstrap = zero if terminated[n] else next_value[n]
        carried = zero if terminated[n] | truncated[n] else following[n]
        advantage[n] = reward[n] + gamma * bootstrap - value[n] + decay * carried


@kernel()
def _sum_row(first: Floats, second: Floats, out: Floats) -> None:
    for n in range(out.shape[0]):
        out[n] = first[n] + second[n]


@kernel()
def gae(
    lo: int,
    hi: int,
    reward: Floats,
    value: Floats,
    next_value: Floats,
    terminated: Flags,
    truncated: Flags,
    active: Flags,
    active_step: int,
    gamma: Number,
    lam: Number,
    advantage: Floats,
    value_target: Floats,
) -> None:
    """Write GAE into ``advantage`` and ``value_target``."""
    steps = reward.shape[0]
    carry = np.zeros(hi - lo, dtype=reward.dtype)
    if active_step == 0:
        for back in range(steps):
            t = steps - 1 - back
            now = advantage[t, lo:hi]
            _gae_row_awake(
                reward[t, lo:hi],
                value[t, lo:hi],
                next_value[t, lo:hi],
                terminated[t, lo:hi],
                truncated[t, lo:hi],
                gamma,
                gamma * lam,
                carry,
                now,
            )
            _sum_row(now, value[t, lo:hi], value_target[t, lo:hi])
            carry = now
        return
    for back in range(steps):
        t = steps - 1 - back
        live = active[t * active_step, lo:hi]
        _gae_row(
            reward[t, lo:hi],
            value[t, lo:hi],
            next_value[t, lo:hi],
            terminated[t, lo:hi],
            truncated[t, lo:hi],
            live,
            gamma,
            gamma * lam,
            carry,
        )
        _write_advantage(carry, value[t, lo:hi], live, advantage[t, lo:hi], value_target[t, lo:hi])


@kernel()
def _return_row(
    reward: Floats,
    next_value: Floats,
    terminated: Flags,
    truncated: Flags,
    active: Flags,
    fresh: Flags,
    gamma: Number,
    lam: Number,
    carry: Floats,
) -> None:
    """carry ← G_t, from carry = G_{t+1}. ``fresh``: no active step follows, so the bootstrap stands for the rest."""
    zero = gamma - gamma
    one = zero + 1
    if lam == one:
        # apart from being quicker, this never reads a next value between two steps: it may be NaN there
        for n in range(carry.shape[0]):
            following = next_value[n] if truncated[n] | fresh[n] else carry[n]
            total = reward[n] + gamma * (zero if terminated[n] else following)
            carry[n] = total if active[n] else carry[n]
    else:
        for n in range(carry.shape[0]):
            following = next_value[n] if truncated[n] | fresh[n] else (one - lam) * next_value[n] + lam * carry[n]
            total = reward[n] + gamma * (zero if terminated[n] else following)
            carry[n] = total if active[n] else carry[n]


@kernel()
def _write_return(carry: Floats, value: Floats, active: Flags, advantage: Floats, value_target: Floats) -> None:
    zero = carry.dtype.type(0)
    for n in range(carry.shape[0]):
        advantage[n] = carry[n] - value[n] if active[n] else zero
        value_target[n] = carry[n] if active[n] else zero


@kernel()
def _no_longer_fresh(fresh: Flags, active: Flags) -> None:
    for n in range(fresh.shape[0]):
        fresh[n] = fresh[n] & (not active[n])


@kernel()
def td_lambda(
    lo: int,
    hi: int,
    reward: Floats,
    value: Floats,
    next_value: Floats,
    terminated: Flags,
    truncated: Flags,
    active: Flags,
    active_step: int,
    gamma: Number,
    lam: Number,
    advantage: Floats,
    value_target: Floats,
) -> None:
    """Write TD(λ) into ``advantage`` and ``value_target``."""
    steps = reward.shape[0]
    carry = np.zeros(hi - lo, dtype=reward.dtype)
    fresh = np.ones(hi - lo, dtype=np.bool_)
    for back in range(steps):
        t = steps - 1 - back
        live = active[t * active_step, lo:hi]
        _return_row(
            reward[t, lo:hi],
            next_value[t, lo:hi],
            terminated[t, lo:hi],
            truncated[t, lo:hi],
            live,
            fresh,
            gamma,
            lam,
            carry,
        )
        _no_longer_fresh(fresh, live)
        _write_return(carry, value[t, lo:hi], live, advantage[t, lo:hi], value_target[t, lo:hi])


@kernel()
def _swap_row(carry: Floats, active: Flags, target: Floats) -> None:
    for n in range(carry.shape[0]):
        shorter = target[n]
        target[n] = carry[n] if active[n] else target[n]
        carry[n] = shorter if active[n] else carry[n]


@kernel()
def n_step(
    lo: int,
    hi: int,
    reward: Floats,
    value: Floats,
    next_value: Floats,
    terminated: Flags,
    truncated: Flags,
    active: Flags,
    active_step: int,
    gamma: Number,
    n: int,
    advantage: Floats,
    value_target: Floats,
) -> None:
    """Write n-step returns: pass m makes the m-step return of t from the (m−1)-step return of the step after t."""
    steps = reward.shape[0]
    one = gamma - gamma + 1
    carry = np.zeros(hi - lo, dtype=reward.dtype)
    fresh = np.ones(hi - lo, dtype=np.bool_)
    for m in range(n):
        fresh[:] = True
        for back in range(steps):
            t = steps - 1 - back
            live = active[t * active_step, lo:hi]
            target = value_target[t, lo:hi]
            _return_row(
                reward[t, lo:hi],
                next_value[t, lo:hi],
                terminated[t, lo:hi],
                truncated[t, lo:hi],
                live,
                fresh,
                gamma,
                one,
                carry,
            )
            if m == 0:
                _write_return(carry, value[t, lo:hi], live, advantage[t, lo:hi], target)
            else:
                _no_longer_fresh(fresh, live)
                _swap_row(carry, live, target)
    for t in range(steps):
        for e in range(lo, hi):
            advantage[t, e] = value_target[t, e] - value[t, e] if active[t * active_step, e] else one - one
