"""The return recursions on the CPU: one loop over the environments of each step, backwards in time.

A kernel's rows are environments. Arrays are C-contiguous (T, N), flattened; ``active`` and ``ratio`` may be None, and
numba leaves out what depends on them. Numbers (``gamma``, …) come in the arrays' dtype, so that float32 stays float32.
Indices are unsigned: numba looks for negative ones otherwise. Zero is a constant, since LLVM does not know that
γ − γ is one.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._kernels.compiled import helper, kernel, run
from headrace.learning._return_recursions import Recursion, Returns, Trace, empty_returns

Floats: TypeAlias = NDArray[np.floating[Any]]
Flags: TypeAlias = NDArray[np.bool_]
Number: TypeAlias = Any  # a numpy scalar of the arrays' dtype
Arrays: TypeAlias = tuple[Floats, Floats, Floats, Flags, Flags]
"""reward, value, next_value, terminated, truncated"""

_SHARE = 1 << 18
"""Fewer steps are done before a sleeping thread has woken up."""


@helper
def _ahead(
    reward: Number,
    value: Number,
    next_value: Number,
    terminated: bool,
    cut: bool,
    gamma: Number,
    zero: Number,
    weight: Number | None,
) -> Number:
    """r + γ·V': V' counts ``weight`` times within an episode (None: once; 0: it is not read)."""
    # a cut trajectory whose V' is unknown goes on from V
    known = value if next_value != next_value else next_value
    within = next_value
    if weight is not None:
        within = weight * next_value if weight != zero else zero
    return reward + gamma * (zero if terminated else (known if cut else within))


@kernel(checked_division=False, no_overlap=True)
def _lambda_returns(
    start: int,
    stop: int,
    shape: tuple[int, int],
    arrays: Arrays,
    active: Flags | None,
    ratio: Floats | None,
    weight: Number | None,
    numbers: tuple[Number, Number, Number, Number],
    advantage: Floats,
    value_target: Floats,
) -> None:
    """See :func:`headrace.learning._return_recursions.lambda_returns`; ``weight`` is 1 − λ, or None for base 1."""
    steps, envs = shape
    reward, value, next_value, terminated, truncated = arrays
    gamma, lam, rho_clip, c_clip = numbers
    zero, decay = reward.dtype.type(0), gamma * lam
    carry = np.zeros(stop - start, reward.dtype)
    # nothing follows the last active step
    fresh = np.ones(stop - start, np.bool_)
    for back in range(steps):
        lo = np.uint64((steps - 1 - back) * envs + start)
        for n in range(np.uint64(stop - start)):
            at = lo + n
            now, old = value[at], carry[n]
            cut = truncated[at] | fresh[n]
            following = zero if terminated[at] | cut else old
            ahead = _ahead(reward[at], now, next_value[at], terminated[at], cut, gamma, zero, weight)
            if weight is None:
                ahead = ahead - now
            if ratio is None:
                x = ahead + decay * following
                estimate = x if weight is None else x - now
            else:
                rho = min(ratio[at], rho_clip)
                x = rho * ahead + decay * min(ratio[at], c_clip) * following
                estimate = rho * (ahead + gamma * following)
            live = active is None or active[at]
            carry[n] = x if live else old
            fresh[n] = fresh[n] & (not live)
            advantage[at] = estimate if live else zero
            target = x + now if weight is None else x
            value_target[at] = target if live else zero


@kernel(checked_division=False, no_overlap=True)
def _n_step(
    start: int,
    stop: int,
    shape: tuple[int, int],
    arrays: Arrays,
    active: Flags | None,
    gamma: Number,
    n: int,
    advantage: Floats,
    value_target: Floats,
) -> None:
    """n-step returns: pass m makes the m-step return of t from the (m−1)-step return of the step after t."""
    steps, envs = shape
    reward, value, next_value, terminated, truncated = arrays
    zero, one = reward.dtype.type(0), reward.dtype.type(1)
    carry = np.zeros(stop - start, reward.dtype)
    for m in range(n):
        fresh = np.ones(stop - start, np.bool_)
        weight = one if m == 0 else zero
        for back in range(steps):
            lo = np.uint64((steps - 1 - back) * envs + start)
            for i in range(np.uint64(stop - start)):
                at = lo + i
                now, old, shorter = value[at], carry[i], value_target[at]
                cut = truncated[at] | fresh[i]
                following = zero if terminated[at] | cut | (m == 0) else old
                ahead = _ahead(reward[at], now, next_value[at], terminated[at], cut, gamma, zero, weight)
                longer = ahead + gamma * following
                live = active is None or active[at]
                carry[i] = shorter if live else old
                fresh[i] = fresh[i] & (not live)
                advantage[at] = longer - now if live else zero
                value_target[at] = longer if live else zero


def lambda_returns(rollout: Trace, recursion: Recursion, ratio: Tensor | None) -> Returns:
    """See :func:`headrace.learning._return_recursions.lambda_returns`."""
    gamma, lam, base, rho_clip, c_clip = map(_scalar(rollout), recursion)
    # None: V' counts once, which numba compiles apart
    weight = None if base else _scalar(rollout)(1 - recursion.lam)
    ratios = None if ratio is None else _array(ratio)
    return _run(_lambda_returns, rollout, ratios, weight, (gamma, lam, rho_clip, c_clip))


def n_step(rollout: Trace, gamma: float, n: int) -> Returns:
    """See :func:`headrace.learning._return_recursions.n_step`."""
    return _run(_n_step, rollout, _scalar(rollout)(gamma), n)


def _scalar(rollout: Trace) -> Any:
    """Return the numpy type of one number of the rollout."""
    return np.float32 if rollout.reward.dtype == torch.float32 else np.float64


def _run(compiled: Any, rollout: Trace, *settings: Any) -> Returns:
    steps, envs = rollout.reward.shape
    outputs = empty_returns(rollout.reward)
    arrays = tuple(_array(tensor) for tensor in rollout[:5])
    active = None if rollout.active is None else _array(rollout.active)
    if steps:
        args = (steps, envs), arrays, active, *settings, *map(_array, outputs)
        run(compiled, envs, *args, min_rows=_SHARE // steps + 1)
    return outputs


def _array(tensor: Tensor) -> NDArray[Any]:
    # asked one by one: at these sizes a detach that does nothing is a measurable part of the whole
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return (tensor if tensor.is_contiguous() else tensor.contiguous()).numpy().reshape(-1)
