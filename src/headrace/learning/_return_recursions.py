"""The return recursions: λ-returns by numba on the CPU and by plain torch elsewhere, n-step returns by plain torch.

Other devices, γ or λ per step, and gradients are for plain torch.
Everything is (T, N), time-major, of one float dtype on one device. Results are fresh, 0 where not active.
``headrace.learning._returns`` is the checked front.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Returns: TypeAlias = tuple[Tensor, Tensor]
"""advantage and value target"""


class Trace(NamedTuple):
    """What every recursion reads. ``active`` is None where every step counts."""

    reward: Tensor
    value: Tensor
    next_value: Tensor
    terminated: Tensor
    truncated: Tensor
    active: Tensor | None


class Recursion(NamedTuple):
    """Which member of the family :func:`lambda_returns` computes."""

    gamma: float | Tensor
    """One number, or (T, N): the discount of every step. The latter is worked in plain torch, a step at a time."""
    lam: float | Tensor
    """As ``gamma``."""
    base: int
    """1: x is what a step adds to V (GAE, V-trace). 0: x is the return itself (TD(λ)), where V' counts 1 − λ times."""
    rho_clip: float = 1.0
    c_clip: float = 1.0


def lambda_returns(
    rollout: Trace, recursion: Recursion, ratio: Tensor | None = None, *, differentiable: bool = False
) -> Returns:
    """Return the recursion that GAE, TD(λ) and V-trace share, backwards over the active steps of each environment.

    ```
    a_t = r_t + γ·w_t·V'_t − base·V_t
    x_t = ρ_t·a_t + γ·λ·c_t·x_{t+1}
    value_target = x_t + base·V_t
    advantage    = x_t − (1 − base)·V_t, or with ratios ρ_t·(a_t + γ·x_{t+1})
    ```

    x_{t+1} is 0 where t terminated, truncated or is the last; V'_t is not read where t terminated; w_t is 1 there and
    for base 1, and 1 − λ within an episode for base 0 (not read for λ = 1). Where t was truncated or is the last and
    V'_t is NaN, V_t stands for it. ρ_t = min(ρ̄, ratio) and c_t = min(c̄, ratio), 1 without ratios.
    """
    per_step = isinstance(recursion.gamma, Tensor) or isinstance(recursion.lam, Tensor)
    if rollout.reward.is_cpu and not differentiable and not per_step:
        from headrace.learning import _returns_numba as kernels

        return kernels.lambda_returns(rollout, recursion, ratio)
    with torch.set_grad_enabled(differentiable):
        return lambda_returns_in_torch(rollout, recursion, ratio)


def n_step(rollout: Trace, *, gamma: float | Tensor, n: int, differentiable: bool = False) -> Returns:
    """Return n-step returns, on any device: pass m makes the m-step returns of all steps at once."""
    with torch.set_grad_enabled(differentiable):
        rollout, active = _fill(rollout)
        reward, (steps, envs) = rollout.reward, rollout.reward.shape
        one_step = returns = reward + gamma * rollout.next_value
        if n > 1 and steps > 1:
            place = following_rows(steps, envs, rollout.active, reward.device)
            stops = rollout.terminated | rollout.truncated | (place >= steps * envs)
            for _ in range(min(n, steps) - 1):
                after = torch.cat((returns.flatten(), reward.new_zeros(envs)))[place]
                returns = torch.where(stops, one_step, reward + gamma * after)
        return (returns - rollout.value).masked_fill(~active, 0), returns.masked_fill(~active, 0)


def following_rows(steps: int, envs: int, active: Tensor | None, device: torch.device) -> Tensor:
    """For each step, the row of the observation that follows it: (T, N) indices into T·N + N rows."""
    rows = torch.arange((steps + 1) * envs, device=device).view(steps + 1, envs)
    if active is None:
        return rows[1:]
    # the next row that was evaluated: skipped ones stand for the first live one after them
    asleep = torch.cat((~active, torch.zeros_like(active[:1]) if steps else active.new_zeros((1, envs))))
    candidates = rows.masked_fill(asleep, (steps + 1) * envs)
    return candidates.flip(0).cummin(0).values.flip(0)[1:]


def lambda_returns_in_torch(rollout: Trace, recursion: Recursion, ratio: Tensor | None) -> Returns:
    """Return :func:`lambda_returns` on any device, a step at a time: what the kernels are compared with."""
    rollout, active = _fill(rollout)
    reward, value = rollout.reward, rollout.value
    if ratio is not None:
        ratio = ratio.masked_fill(~active, 1)
    advantage, value_target = torch.zeros_like(reward), torch.zeros_like(reward)
    carry = reward.new_zeros(reward.shape[1])
    fresh = torch.ones_like(carry, dtype=torch.bool)
    for t in reversed(range(reward.shape[0])):
        gamma, lam = _at(recursion.gamma, t), _at(recursion.lam, t)
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


def _fill(rollout: Trace) -> tuple[Trace, Tensor]:
    """Return the rollout with V for V' where a trajectory was cut and V' is NaN, and the active steps.

    What no recursion reads is 0: the gradient of a NaN that does not count is NaN.
    """
    reward, value, following, terminated, truncated, _ = rollout
    active = torch.ones_like(terminated) if rollout.active is None else rollout.active
    is_last = active & (active.flip(0).cumsum(0).flip(0) == 1)
    following = torch.where(following.isnan() & (truncated | is_last), value, following)
    reward, value, following = (numbers.masked_fill(~active, 0) for numbers in (reward, value, following))
    return Trace(reward, value, following.masked_fill(terminated, 0), terminated, truncated, active), active


def _at(number: float | Tensor, t: int) -> float | Tensor:
    return number[t] if isinstance(number, Tensor) else number


def _ahead(rollout: Trace, t: int, cut: Tensor, gamma: float | Tensor, weight: float | Tensor) -> Tensor:
    """r + γ·V': V' counts ``weight`` times within an episode; where that is 0 it is not read."""
    next_value = rollout.next_value[t]
    unread = weight == 0 if isinstance(weight, Tensor) else torch.full_like(cut, weight == 0)
    return rollout.reward[t] + gamma * torch.where(cut, next_value, weight * next_value.masked_fill(unread & ~cut, 0))
