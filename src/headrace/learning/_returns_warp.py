"""The return recursions in Warp, for CUDA: one thread per environment, backwards in time.

Neighboring threads read neighboring addresses of a time-major array, so loads coalesce. The kernels are generic in
the float dtype. They also run on Warp's CPU device, which is how they are tested.
"""

# Warp reads the annotations as types of its own language, which no type checker knows:
# pyright: reportInvalidTypeForm=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import warp as wp
from torch import Tensor

from headrace._device import warp_launches
from headrace.learning._return_recursions import Recursion, Returns, Trace, empty_returns


@wp.kernel
def _lambda_returns(
    # inputs
    reward: wp.array2d(dtype=Any),
    value: wp.array2d(dtype=Any),
    next_value: wp.array2d(dtype=Any),
    terminated: wp.array2d(dtype=wp.bool),
    truncated: wp.array2d(dtype=wp.bool),
    active: wp.array2d(dtype=wp.bool),
    ratio: wp.array2d(dtype=Any),
    has_ratio: int,
    gamma: Any,
    lam: Any,
    base: Any,
    rho_clip: Any,
    c_clip: Any,
    # outputs
    advantage: wp.array2d(dtype=Any),
    value_target: wp.array2d(dtype=Any),
):
    """See ``headrace.learning._return_recursions.lambda_returns``; launch N threads."""
    n = wp.tid()
    steps = reward.shape[0]
    zero = gamma - gamma
    one = wp.exp(gamma - gamma)
    carry = gamma - gamma
    followers = n - n  # a variable: Warp takes a literal for a constant
    for back in range(steps):
        t = steps - 1 - back
        advantage[t, n] = zero
        value_target[t, n] = zero
        if active[t, n]:
            cut = truncated[t, n] or followers == 0
            following = carry
            if terminated[t, n] or cut:
                following = zero
            weight = base + (one - base) * (one - lam)
            bootstrap = next_value[t, n]
            if not cut:
                bootstrap = zero
                if weight != zero:  # what does not count is not read: it may be NaN
                    bootstrap = weight * next_value[t, n]
            if terminated[t, n]:
                bootstrap = zero
            ahead = reward[t, n] + gamma * bootstrap - base * value[t, n]
            if has_ratio == 1:
                rho = wp.min(ratio[t, n], rho_clip)
                carry = rho * ahead + gamma * lam * wp.min(ratio[t, n], c_clip) * following
                advantage[t, n] = rho * (ahead + gamma * following)
            else:
                carry = ahead + gamma * lam * following
                advantage[t, n] = carry - (one - base) * value[t, n]
            value_target[t, n] = carry + base * value[t, n]
            followers = followers + 1


@wp.kernel
def _n_step(
    # inputs
    reward: wp.array2d(dtype=Any),
    value: wp.array2d(dtype=Any),
    next_value: wp.array2d(dtype=Any),
    terminated: wp.array2d(dtype=wp.bool),
    truncated: wp.array2d(dtype=wp.bool),
    active: wp.array2d(dtype=wp.bool),
    horizon: int,
    gamma: Any,
    # outputs
    advantage: wp.array2d(dtype=Any),
    value_target: wp.array2d(dtype=Any),
):
    """Write n-step returns; launch (T, N) threads, each of which walks forward over its own window."""
    t, n = wp.tid()
    steps = reward.shape[0]
    zero = gamma - gamma
    if not active[t, n]:
        advantage[t, n] = zero
        value_target[t, n] = zero
        return
    total = gamma - gamma
    discount = wp.exp(gamma - gamma)
    taken = t - t
    last = int(t)
    s = int(t)
    while s < steps and taken < horizon:
        if active[s, n]:
            last = s
            total = total + discount * reward[s, n]
            discount = discount * gamma
            taken = taken + 1
            if terminated[s, n] or truncated[s, n]:
                taken = horizon
        s = s + 1
    bootstrap = next_value[last, n]
    if terminated[last, n]:
        bootstrap = zero
    total = total + discount * bootstrap
    advantage[t, n] = total - value[t, n]
    value_target[t, n] = total


def lambda_returns(rollout: Trace, recursion: Recursion, ratio: Tensor | None) -> Returns:
    """See :func:`headrace.learning._return_recursions.lambda_returns`."""
    # kernels take no None: any array of the dtype does where there are no ratios
    extra = (rollout.reward if ratio is None else ratio, 0 if ratio is None else 1)
    return _launch(_lambda_returns, rollout.reward.shape[1], rollout, extra, tuple(recursion))


def n_step(rollout: Trace, gamma: float, n: int) -> Returns:
    """See :func:`headrace.learning._return_recursions.n_step`."""
    return _launch(_n_step, tuple(rollout.reward.shape), rollout, (n,), (gamma,))


def _launch(
    kernel: Any, dim: int | tuple[int, ...], rollout: Trace, extra: tuple[Any, ...], numbers: tuple[Any, ...]
) -> Returns:
    reward = rollout.reward
    outputs = empty_returns(reward)
    if reward.numel() == 0:
        return outputs
    scalar = wp.float32 if reward.dtype == torch.float32 else wp.float64
    # Warp's view of a tensor does not keep it alive
    inputs = [t.detach().contiguous() if isinstance(t, Tensor) else t for t in (*rollout, *extra)]
    with warp_launches(reward.device) as device:
        wp.launch(
            kernel,
            dim=dim,
            inputs=[*(wp.from_torch(t) if isinstance(t, Tensor) else t for t in inputs), *map(scalar, numbers)],
            outputs=[wp.from_torch(tensor) for tensor in outputs],
            device=device,
        )
    return outputs
