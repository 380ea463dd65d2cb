"""The return recursions in plain torch, a step at a time: what the CPU and CUDA kernels are compared with.

The rollout says which steps are active, and knows V' wherever a trajectory is cut.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from headrace.learning._return_recursions import Recursion, Returns, Trace


@torch.no_grad()
def lambda_returns(rollout: Trace, recursion: Recursion, ratio: Tensor | None) -> Returns:
    """See :func:`headrace.learning._return_recursions.lambda_returns`."""
    reward, value = rollout.reward, rollout.value
    active, lam = cast("Tensor", rollout.active), recursion.lam
    advantage, value_target = torch.zeros_like(reward), torch.zeros_like(reward)
    carry = reward.new_zeros(reward.shape[1])
    fresh = torch.ones_like(carry, dtype=torch.bool)
    for t in reversed(range(reward.shape[0])):
        gamma = _at(recursion.gamma, t)
        cut = rollout.truncated[t] | fresh
        following = carry.masked_fill(rollout.terminated[t] | cut, 0)
        ahead = _ahead(rollout, t, cut, gamma, 1.0 if recursion.base else 1 - lam) - recursion.base * value[t]
        if ratio is None:
            now = ahead + gamma * lam * following
            estimate = now if recursion.base else now - value[t]
        else:
            rho, c = ratio[t].clamp(max=recursion.rho_clip), ratio[t].clamp(max=recursion.c_clip)
            now = rho * ahead + gamma * lam * c * following
            estimate = rho * (ahead + gamma * following)
        carry = torch.where(active[t], now, carry)
        fresh = fresh & ~active[t]
        advantage[t] = estimate.masked_fill(~active[t], 0)
        value_target[t] = (now + recursion.base * value[t]).masked_fill(~active[t], 0)
    return advantage, value_target


@torch.no_grad()
def n_step(rollout: Trace, discount: float | Tensor, n: int) -> Returns:
    """See :func:`headrace.learning._return_recursions.n_step`."""
    reward, active = rollout.reward, cast("Tensor", rollout.active)
    returns = torch.empty_like(reward)
    for m in range(n):
        longer = torch.empty_like(returns)
        carry = reward.new_zeros(reward.shape[1])
        fresh = torch.ones_like(carry, dtype=torch.bool)
        for t in reversed(range(reward.shape[0])):
            gamma = _at(discount, t)
            cut = rollout.truncated[t] | fresh
            ahead = _ahead(rollout, t, cut, gamma, 0.0 if m else 1.0)
            stops = rollout.terminated[t] | cut
            longer[t] = torch.where(stops, ahead, ahead + gamma * carry) if m else ahead
            carry = torch.where(active[t], returns[t], carry)
            fresh = fresh & ~active[t]
        returns = longer
    return (returns - rollout.value).masked_fill(~active, 0), returns.masked_fill(~active, 0)


def _at(gamma: float | Tensor, t: int) -> float | Tensor:
    return gamma[t] if isinstance(gamma, Tensor) else gamma


def _ahead(rollout: Trace, t: int, cut: Tensor, gamma: float | Tensor, weight: float) -> Tensor:
    """r + γ·V': V' is 0 where terminated and counts ``weight`` times within an episode."""
    next_value = rollout.next_value[t]
    within = torch.zeros_like(next_value) if weight == 0 else weight * next_value
    return rollout.reward[t] + gamma * torch.where(cut, next_value, within).masked_fill(rollout.terminated[t], 0)
