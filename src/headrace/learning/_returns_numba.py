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
from headrace.learning._returns import Recursion, Returns, Trace

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
    """See :func:`headrace.learning._returns.lambda_returns`; ``weight`` is 1 − λ, or None for base 1."""
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


def lambda_returns(rollout: Trace, recursion: Recursion, ratio: Tensor | None) -> Returns:
    """See :func:`headrace.learning._returns.lambda_returns`."""
    (steps, envs), dtype = rollout.reward.shape, rollout.reward.dtype
    number = np.float32 if dtype == torch.float32 else np.float64
    gamma, lam, base, rho_clip, c_clip = map(number, recursion)
    # None: V' counts once, which numba compiles apart
    weight = None if base else number(1 - recursion.lam)
    outputs = torch.empty(steps, envs, dtype=dtype), torch.empty(steps, envs, dtype=dtype)
    if steps:
        arrays = tuple(_array(tensor) for tensor in rollout[:5])
        active, ratios = (None if given is None else _array(given) for given in (rollout.active, ratio))
        args = (steps, envs), arrays, active, ratios, weight, (gamma, lam, rho_clip, c_clip), *map(_array, outputs)
        run(_lambda_returns, envs, *args, min_rows=_SHARE // steps + 1)
    return outputs


def _array(tensor: Tensor) -> NDArray[Any]:
    # asked one by one: at these sizes a detach that does nothing is a measurable part of the whole
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return (tensor if tensor.is_contiguous() else tensor.contiguous()).numpy().reshape(-1)
