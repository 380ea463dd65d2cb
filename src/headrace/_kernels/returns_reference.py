"""The return recursions in plain torch, a step at a time: what the CPU and CUDA kernels are compared with.

Tensors are (T, N), ``active`` bool (T, N). Any float dtype, any device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    active: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalized advantages and their value targets."""
    advantage, value_target = torch.zeros_like(reward), torch.zeros_like(reward)
    carry = torch.zeros_like(reward[0]) if len(reward) else reward.new_zeros(reward.shape[1])
    for t in reversed(range(reward.shape[0])):
        bootstrap = next_value[t].masked_fill(terminated[t], 0)
        following = carry.masked_fill(terminated[t] | truncated[t], 0)
        now = reward[t] + gamma * bootstrap - value[t] + gamma * lam * following
        carry = torch.where(active[t], now, carry)
        advantage[t] = now.masked_fill(~active[t], 0)
        value_target[t] = (now + value[t]).masked_fill(~active[t], 0)
    return advantage, value_target


def td_lambda(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    active: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """TD(λ) advantages and returns."""
    advantage, value_target = torch.zeros_like(reward), torch.zeros_like(reward)
    carry = reward.new_zeros(reward.shape[1])
    fresh = torch.ones_like(carry, dtype=torch.bool)
    for t in reversed(range(reward.shape[0])):
        mixed = carry if lam == 1 else (1 - lam) * next_value[t] + lam * carry
        following = torch.where(truncated[t] | fresh, next_value[t], mixed).masked_fill(terminated[t], 0)
        now = reward[t] + gamma * following
        carry = torch.where(active[t], now, carry)
        fresh = fresh & ~active[t]
        advantage[t] = (now - value[t]).masked_fill(~active[t], 0)
        value_target[t] = now.masked_fill(~active[t], 0)
    return advantage, value_target


def n_step(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    active: Tensor,
    *,
    gamma: float,
    n: int,
) -> tuple[Tensor, Tensor]:
    """n-step advantages and returns: the m-step return of t from the (m−1)-step return of the step after t."""
    alone = reward + gamma * next_value.masked_fill(terminated, 0)
    returns = alone
    for _ in range(n - 1):
        longer = torch.empty_like(returns)
        carry = reward.new_zeros(reward.shape[1])
        fresh = torch.ones_like(carry, dtype=torch.bool)
        for t in reversed(range(reward.shape[0])):
            stops = terminated[t] | truncated[t] | fresh
            longer[t] = torch.where(stops, alone[t], reward[t] + gamma * carry)
            carry = torch.where(active[t], returns[t], carry)
            fresh = fresh & ~active[t]
        returns = longer
    return (returns - value).masked_fill(~active, 0), returns.masked_fill(~active, 0)


def vtrace(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    active: Tensor,
    ratio: Tensor,
    *,
    gamma: float,
    rho_clip: float,
    c_clip: float,
) -> tuple[Tensor, Tensor]:
    """V-trace policy-gradient advantages and value targets."""
    advantage, value_target = torch.zeros_like(reward), torch.zeros_like(reward)
    carry = reward.new_zeros(reward.shape[1])
    for t in reversed(range(reward.shape[0])):
        rho, c = ratio[t].clamp(max=rho_clip), ratio[t].clamp(max=c_clip)
        bootstrap = next_value[t].masked_fill(terminated[t], 0)
        following = carry.masked_fill(terminated[t] | truncated[t], 0)
        now = rho * (reward[t] + gamma * bootstrap - value[t]) + gamma * c * following
        carry = torch.where(active[t], now, carry)
        advantage[t] = (rho * (reward[t] + gamma * (bootstrap + following) - value[t])).masked_fill(~active[t], 0)
        value_target[t] = (now + value[t]).masked_fill(~active[t], 0)
    return advantage, value_target
