"""The return recursions on the CPU: one pass over the bytes, backwards in time; a kernel's rows are environments.

Each step is worked in short loops over few arrays. One loop over all of them would read better, but LLVM vectorizes a
loop only where it can show with eight comparisons that its arrays do not overlap.

Arrays are C-contiguous (T, N); ``active`` and ``ratio`` may be None, and numba leaves out what depends on them. Numbers
(``gamma``, …) come in the arrays' dtype, so that float32 stays float32.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import helper, kernel

Floats: TypeAlias = NDArray[np.floating[Any]]
Flags: TypeAlias = NDArray[np.bool_]
Number: TypeAlias = Any  # a numpy scalar of the arrays' dtype


@helper
def _mark_cuts(truncated: Flags, active: Flags | None, fresh: Flags, cut: Flags) -> None:
    """cut: what follows is not known. ``fresh``: no active step follows; cleared for those that are active now."""
    for n in range(cut.shape[0]):
        cut[n] = truncated[n] | fresh[n]
    for n in range(cut.shape[0]):
        fresh[n] = False if active is None else fresh[n] & (not active[n])


@helper
def _step(
    reward: Floats,
    value: Floats,
    next_value: Floats,
    terminated: Flags,
    cut: Flags,
    active: Flags | None,
    ratio: Floats | None,
    following: Floats,
    gamma: Number,
    decay: Number,
    base: Number,
    weight: Number | None,
    rho_clip: Number,
    c_clip: Number,
    out: Floats,
) -> None:
    """out = x_t, from following = x_{t+1}; those that are not active keep theirs.

    Within an episode V' counts ``weight`` times (0: it is not read; None: once).
    """
    zero = gamma - gamma
    for n in range(out.shape[0]):
        # a cut trajectory whose V' is unknown goes on from V
        known = value[n] if cut[n] & (next_value[n] != next_value[n]) else next_value[n]
        if weight is not None:
            within = weight * next_value[n] if weight != zero else zero
            known = known if cut[n] else within
        ahead = reward[n] + gamma * (zero if terminated[n] else known) - base * value[n]
        carried = zero if terminated[n] | cut[n] else following[n]
        if ratio is None:
            new = ahead + decay * carried
        else:
            new = min(ratio[n], rho_clip) * ahead + decay * min(ratio[n], c_clip) * carried
        out[n] = new if active is None or active[n] else following[n]


@helper
def _write(x: Floats, value: Floats, times: Number, active: Flags | None, out: Floats) -> None:
    """out = x + times·V; 0 where not active."""
    zero = times - times
    if times == zero:
        for n in range(out.shape[0]):
            out[n] = x[n] if active is None or active[n] else zero
    else:
        for n in range(out.shape[0]):
            out[n] = x[n] + times * value[n] if active is None or active[n] else zero


@helper
def _zero(active: Flags | None, out: Floats) -> None:
    zero = out.dtype.type(0)
    for n in range(out.shape[0]):
        out[n] = out[n] if active is None or active[n] else zero


@kernel(checked_division=False)
def lambda_returns(
    start: int,
    stop: int,
    reward: Floats,
    value: Floats,
    next_value: Floats,
    terminated: Flags,
    truncated: Flags,
    active: Flags | None,
    ratio: Floats | None,
    weight: Number | None,
    gamma: Number,
    lam: Number,
    rho_clip: Number,
    c_clip: Number,
    advantage: Floats,
    value_target: Floats,
) -> None:
    """See :func:`headrace._kernels.returns.lambda_returns`."""
    one = gamma - gamma + 1
    base = one if weight is None else one - one
    carry = np.zeros(stop - start, reward.dtype)
    spare = np.empty_like(carry)
    # nothing follows the last step
    fresh, cut = np.ones(stop - start, np.bool_), np.ones(stop - start, np.bool_)
    for back in range(reward.shape[0]):
        t = reward.shape[0] - 1 - back
        rewards, values, next_values = reward[t, start:stop], value[t, start:stop], next_value[t, start:stop]
        ends, to_advantage, to_target = terminated[t, start:stop], advantage[t, start:stop], value_target[t, start:stop]
        live = None if active is None else active[t, start:stop]
        if active is not None:
            _mark_cuts(truncated[t, start:stop], live, fresh, cut)
        elif back > 0:
            cut = truncated[t, start:stop]
        if ratio is not None:
            weights = ratio[t, start:stop]
            # ρ·(a + γ·x) is x with ρ in the place of c
            _step(
                *(rewards, values, next_values, ends, cut, None, weights, carry),
                *(gamma, gamma, base, weight, rho_clip, rho_clip, to_advantage),
            )
            _step(
                *(rewards, values, next_values, ends, cut, live, weights, carry),
                *(gamma, gamma * lam, base, weight, rho_clip, c_clip, spare),
            )
            if active is not None:
                _zero(live, to_advantage)
            _write(spare, values, base, live, to_target)
            spare, carry = carry, spare
        elif active is not None:
            _step(
                *(rewards, values, next_values, ends, cut, live, None, carry),
                *(gamma, gamma * lam, base, weight, rho_clip, c_clip, spare),
            )
            _write(spare, values, base - one, live, to_advantage)
            _write(spare, values, base, live, to_target)
            spare, carry = carry, spare
        else:
            # x is one of the results, and lies there from the start
            new, other = (to_advantage, to_target) if base == one else (to_target, to_advantage)
            _step(
                *(rewards, values, next_values, ends, cut, None, None, carry),
                *(gamma, gamma * lam, base, weight, rho_clip, c_clip, new),
            )
            _write(new, values, base + base - one, None, other)
            carry = new


@kernel(checked_division=False)
def n_step(
    start: int,
    stop: int,
    reward: Floats,
    value: Floats,
    next_value: Floats,
    terminated: Flags,
    truncated: Flags,
    active: Flags | None,
    gamma: Number,
    n: int,
    advantage: Floats,
    value_target: Floats,
) -> None:
    """n-step returns: pass m makes the m-step return of t from the (m−1)-step return of the step after t."""
    zero, one = gamma - gamma, gamma - gamma + 1
    carry = np.zeros(stop - start, reward.dtype)
    new = np.empty_like(carry)
    fresh, marked = np.empty(stop - start, np.bool_), np.empty(stop - start, np.bool_)
    for m in range(n):
        for e in range(stop - start):
            fresh[e] = True
        for back in range(reward.shape[0]):
            t = reward.shape[0] - 1 - back
            live = None if active is None else active[t, start:stop]
            values, ends, target = value[t, start:stop], terminated[t, start:stop], value_target[t, start:stop]
            _mark_cuts(truncated[t, start:stop], live, fresh, marked)
            rewards = reward[t, start:stop]
            next_values = next_value[t, start:stop]
            # the first pass bootstraps after every step, the others only at the ends
            weight, decay = (one, zero) if m == 0 else (zero, gamma)
            _step(
                *(rewards, values, next_values, ends, marked, None, None, carry),
                *(gamma, decay, zero, weight, one, one, new),
            )
            if m > 0:
                for e in range(stop - start):
                    carry[e] = target[e] if live is None or live[e] else carry[e]
            _write(new, values, zero, live, target)
    for t in range(reward.shape[0]):
        live = None if active is None else active[t, start:stop]
        _write(value_target[t, start:stop], value[t, start:stop], -one, live, advantage[t, start:stop])
