"""The return recursions on the CPU, backwards in time; a kernel's rows are environments.

Several steps are worked at once, as many as stay in a fast cache: what does not depend on the next step is one flat
loop over all of them, and only the carry goes step by step, so that narrow rollouts (few environments, many steps)
are not slower than wide ones. Loops are short and over few arrays: LLVM vectorizes one only where it can show with
eight comparisons that its arrays do not overlap. Indices are unsigned: numba looks for negative ones otherwise. What
stays as it is is written as a sum with zero: LLVM makes a branch of a store of what was just loaded.

Arrays are C-contiguous (T, N), flattened; ``active`` and ``ratio`` may be None, and numba leaves out what depends on
them. Numbers (``gamma``, …) come in the arrays' dtype, so that float32 stays float32.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import helper, kernel

Floats: TypeAlias = NDArray[np.floating[Any]]
Flags: TypeAlias = NDArray[np.bool_]
Number: TypeAlias = Any  # a numpy scalar of the arrays' dtype
Index: TypeAlias = Any  # np.uint64
Rollout: TypeAlias = tuple[Floats, Floats, Floats, Flags, Flags]
"""reward, value, next_value, terminated, truncated"""
Numbers: TypeAlias = tuple[Number, Number, Number, Number]
"""γ, λ, ρ̄, c̄"""

_BLOCK = 4096
"""Elements that are worked at once."""
_WIDE = 512
"""Environments from which on a step is work enough for a loop of its own."""


@helper
def _mark(lo: Index, count: Index, truncated: Flags, active: Flags | None, fresh: Flags, cut: Flags, at: Index) -> None:
    """cut: what follows is not known. ``fresh``: no active step follows; cleared for those that are active now."""
    for i in range(count):
        cut[at + i] = truncated[lo + i] | fresh[i]
    for i in range(count):
        fresh[i] = False if active is None else fresh[i] & (not active[lo + i])


@helper
def _ahead(
    lo: Index,
    count: Index,
    rollout: Rollout,
    ratio: Floats | None,
    cut: Flags,
    at: Index,
    numbers: Numbers,
    weight: Number | None,
    out: Floats,
) -> None:
    """out = ρ_t·a_t; within an episode V' counts ``weight`` times (0: not read; None: once, and V is taken off)."""
    reward, value, next_value, terminated, _ = rollout
    gamma, _, rho_clip, _ = numbers
    zero = gamma - gamma
    for i in range(count):
        now, then = value[lo + i], next_value[lo + i]
        # a cut trajectory whose V' is unknown goes on from V
        known = now if cut[at + i] & (then != then) else then
        if weight is not None:
            known = known if cut[at + i] else (weight * then if weight != zero else zero)
        ahead = reward[lo + i] + gamma * (zero if terminated[lo + i] else known)
        if weight is None:
            ahead = ahead - now
        out[lo + i] = ahead if ratio is None else min(ratio[lo + i], rho_clip) * ahead


@helper
def _go_on(
    lo: Index,
    count: Index,
    terminated: Flags,
    active: Flags | None,
    cut: Flags,
    at: Index,
    decay: Number,
    x: Floats,
    following: Floats,
    after: Index,
) -> None:
    """x_t ← x_t + decay·x_{t+1}, which lies in ``following`` from ``after`` on.

    With ``active`` that is a carry, which those that are active replace.
    """
    zero = decay - decay
    for n in range(count):
        old = following[after + n]
        new = x[lo + n] + decay * (zero if terminated[lo + n] | cut[at + n] else old)
        x[lo + n] = new
        if active is not None:
            following[after + n] = new if active[lo + n] else old + zero


@helper
def _gae_step(
    lo: Index, count: Index, rollout: Rollout, numbers: Numbers, advantage: Floats, target: Floats, after: Index
) -> None:
    """:func:`_ahead`, :func:`_go_on` and :func:`_add_value` of GAE where every step counts, in one pass over memory."""
    reward, value, next_value, terminated, truncated = rollout
    gamma, lam, _, _ = numbers
    zero, decay = gamma - gamma, gamma * lam
    for i in range(count):
        now, then, old = value[lo + i], next_value[lo + i], advantage[after + i]
        ends = terminated[lo + i] | truncated[lo + i]
        # in two selections, which vector units do quicker than one of a combined condition
        known = then if then == then else now
        known = known if ends else then
        carried = zero if ends else old
        advantage[lo + i] = reward[lo + i] + gamma * (zero if terminated[lo + i] else known) - now + decay * carried
    for i in range(count):
        target[lo + i] = advantage[lo + i] + value[lo + i]


@helper
def _go_on_weighted(
    lo: Index,
    count: Index,
    terminated: Flags,
    active: Flags | None,
    ratio: Floats,
    cut: Flags,
    at: Index,
    numbers: Numbers,
    advantage: Floats,
    x: Floats,
    carry: Floats,
) -> None:
    """advantage = x_t + γ·ρ_t·x_{t+1}, x_t ← x_t + γ·λ·c_t·x_{t+1}, where x_t is ρ_t·a_t at first."""
    gamma, lam, rho_clip, c_clip = numbers
    zero, decay = gamma - gamma, gamma * lam
    for n in range(count):
        old = carry[n]
        carried = zero if terminated[lo + n] | cut[at + n] else old
        advantage[lo + n] = x[lo + n] + gamma * min(ratio[lo + n], rho_clip) * carried
    for n in range(count):
        old = carry[n]
        carried = zero if terminated[lo + n] | cut[at + n] else old
        new = x[lo + n] + decay * min(ratio[lo + n], c_clip) * carried
        x[lo + n] = new
        if active is None:
            carry[n] = new
    if active is not None:
        for n in range(count):
            old, new = carry[n], x[lo + n]
            carry[n] = new if active[lo + n] else old + zero


@helper
def _lengthen(
    lo: Index,
    count: Index,
    reward: Floats,
    terminated: Flags,
    active: Flags | None,
    cut: Flags,
    at: Index,
    gamma: Number,
    target: Floats,
    carry: Floats,
) -> None:
    """target ← r_t + γ·carry, the next step's target before this pass; carry ← target before this pass."""
    for n in range(count):
        shorter, old = target[lo + n], carry[n]
        longer = reward[lo + n] + gamma * old
        target[lo + n] = shorter if terminated[lo + n] | cut[at + n] else longer
        carry[n] = shorter if active is None or active[lo + n] else old


@helper
def _add_value(
    lo: Index, count: Index, times: Number, x: Floats, value: Floats, active: Flags | None, out: Floats
) -> None:
    """out = x + times·V; 0 where not active."""
    zero = times - times
    for i in range(count):
        total = x[lo + i] + times * value[lo + i]
        out[lo + i] = total if active is None or active[lo + i] else zero


@helper
def _add_own_value(lo: Index, count: Index, value: Floats, x: Floats) -> None:
    """x ← x + V, in place, which two arguments that are one array would hide from LLVM."""
    for i in range(count):
        x[lo + i] = x[lo + i] + value[lo + i]


@helper
def _clear(lo: Index, count: Index, active: Flags | None, out: Floats) -> None:
    """0 where not active."""
    zero = out.dtype.type(0)
    if active is not None:
        for i in range(count):
            old = out[lo + i]
            out[lo + i] = old + zero if active[lo + i] else zero


@kernel(checked_division=False)
def lambda_returns(
    start: int,
    stop: int,
    shape: tuple[int, int],
    rollout: Rollout,
    active: Flags | None,
    ratio: Floats | None,
    weight: Number | None,
    numbers: Numbers,
    advantage: Floats,
    value_target: Floats,
) -> None:
    """See :func:`headrace._kernels.returns.lambda_returns`."""
    steps, envs = shape
    reward, value, _, terminated, truncated = rollout
    gamma, lam, _, _ = numbers
    one, decay = gamma - gamma + 1, gamma * lam
    width, none = np.uint64(stop - start), np.uint64(0)
    # whole rows only lie side by side
    rows = max(1, _BLOCK // envs) if stop - start == envs else 1
    carry = np.zeros(stop - start, reward.dtype)
    # nothing follows the last step; with ``active`` that is not the same row for all
    fresh = np.ones(stop - start, np.bool_)
    marks = np.ones(rows * (stop - start), np.bool_)
    x = value_target if weight is not None or ratio is not None else advantage
    end = steps
    while end > 0:
        begin = max(end - (rows if end < steps or active is not None else 1), 0)
        lo, count = np.uint64(begin * envs + start), np.uint64((end - begin) * (stop - start))
        cut, where = marks, none
        if active is not None:
            for back in range(end - begin):
                at = np.uint64((end - begin - 1 - back) * (stop - start))
                _mark(lo + at, width, truncated, active, fresh, marks, at)
        elif end < steps:
            cut, where = truncated, lo
        _ahead(lo, count, rollout, ratio, cut, where, numbers, weight, x)
        for back in range(end - begin):
            at = np.uint64((end - begin - 1 - back) * (stop - start))
            if ratio is not None:
                _go_on_weighted(
                    lo + at, width, terminated, active, ratio, cut, where + at, numbers, advantage, x, carry
                )
            elif active is not None:
                _go_on(lo + at, width, terminated, active, cut, where + at, decay, x, carry, none)
            elif end < steps:
                after = lo + at + np.uint64(envs)
                _go_on(lo + at, width, terminated, None, cut, where + at, decay, x, x, after)
        if ratio is not None:
            _add_own_value(lo, count, value, x)
            _clear(lo, count, active, advantage)
        elif weight is None:
            _add_value(lo, count, one, x, value, active, value_target)
        else:
            _add_value(lo, count, -one, x, value, active, advantage)
        _clear(lo, count, active, x)
        end = begin
        if active is None and ratio is None and weight is None and stop - start >= _WIDE:
            for back in range(1, steps):
                lo = np.uint64((steps - 1 - back) * envs + start)
                _gae_step(lo, width, rollout, numbers, advantage, value_target, lo + np.uint64(envs))
            return


@kernel(checked_division=False)
def n_step(
    start: int,
    stop: int,
    shape: tuple[int, int],
    rollout: Rollout,
    active: Flags | None,
    gamma: Number,
    n: int,
    advantage: Floats,
    value_target: Floats,
) -> None:
    """n-step returns: pass m makes the m-step return of t from the (m−1)-step return of the step after t."""
    steps, envs = shape
    reward, value, _, terminated, truncated = rollout
    one = gamma - gamma + 1
    width = np.uint64(stop - start)
    carry = np.zeros(stop - start, reward.dtype)
    fresh, cut = np.ones(stop - start, np.bool_), np.empty(steps * (stop - start), np.bool_)
    for back in range(steps):
        t = steps - 1 - back
        lo, at = np.uint64(t * envs + start), np.uint64(t * (stop - start))
        _mark(lo, width, truncated, active, fresh, cut, at)
        _ahead(lo, width, rollout, None, cut, at, (gamma, one, one, one), one, value_target)
    for _ in range(n - 1):
        for back in range(steps):
            t = steps - 1 - back
            lo, at = np.uint64(t * envs + start), np.uint64(t * (stop - start))
            _lengthen(lo, width, reward, terminated, active, cut, at, gamma, value_target, carry)
    for t in range(steps):
        lo = np.uint64(t * envs + start)
        _add_value(lo, width, -one, value_target, value, active, advantage)
        _clear(lo, width, active, value_target)
