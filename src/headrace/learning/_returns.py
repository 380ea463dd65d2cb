"""Value estimators: pure functions from a rollout to advantages and value targets.

Every estimator takes tensors (T, N), time-major, or (N, T) with ``batch_first=True``:

- ``reward``, ``value`` = V(s_t) and ``next_value`` = V(s_{t+1}), float32 or float64, one dtype;
- ``terminated`` and ``truncated``, bool: the step ended the episode. Termination does not bootstrap. Truncation does,
  with ``next_value``, which there is the value of the *true* last observation, not of the next episode's first.
- ``active``, bool, optional: False where an environment was suspended. Such steps are transparent: the others get what
  they would get if the suspended steps were not there. Their own results are 0, and whatever they hold, NaN
  included, is never read.

- ``gamma`` and ``lam``, one number, or a tensor in the shape of ``reward`` with the γ_t or λ_t of every step (as n-step
  samples have them, or tasks whose steps differ in length). One number is much faster: it has kernels of its own.

The last step of the rollout cuts whatever goes on: it bootstraps with ``next_value`` too.

What a step does not read cannot reach a result: ``next_value`` may be NaN where the step terminated, and between the
steps of an episode for estimators that do not bootstrap there. Where a trajectory is truncated or cut and its
``next_value`` is NaN, because a compact store has no observation for it, ``value`` stands for it: V(s_t) for
V(s_{t+1}), as in TorchRL. That is an approximation; :func:`~headrace.learning.repair_next_obs` counts such steps.

Results are fresh, in the layout and dtype of the inputs. They carry no gradient, unless ``differentiable``: then it
flows to rewards, values, next values and log-ratios, as far as they are read, through plain torch, a step at a time.

In the docstrings γ is ``gamma``, V_t is ``value``, V'_t is ``next_value``, set to 0 where terminated, and t+1 is
the environment's next active step.

The return recursions: λ-returns by numba on the CPU and by plain torch elsewhere, n-step returns by plain torch.

Other devices, γ or λ per step, and gradients are for plain torch.
Everything is (T, N), time-major, of one float dtype on one device. Results are fresh, 0 where not active.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from headrace.errors import ConfigError, DeviceError, DtypeError, ShapeError

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


def sum_steps(rollout: Trace, *, gamma: float | Tensor, n: int, differentiable: bool = False) -> Returns:
    """Return n-step returns, on any device: pass m makes the m-step returns of all steps at once."""
    with torch.set_grad_enabled(differentiable):
        rollout, active = _fill(rollout)
        reward, (steps, envs) = rollout.reward, rollout.reward.shape
        one_step = returns = reward + gamma * rollout.next_value
        if n > 1 and steps > 1:
            place = find_following_rows(steps, envs, rollout.active, reward.device)
            stops = rollout.terminated | rollout.truncated | (place >= steps * envs)
            for _ in range(min(n, steps) - 1):
                after = torch.cat((returns.flatten(), reward.new_zeros(envs)))[place]
                returns = torch.where(stops, one_step, reward + gamma * after)
        return (returns - rollout.value).masked_fill(~active, 0), returns.masked_fill(~active, 0)


def find_following_rows(steps: int, envs: int, active: Tensor | None, device: torch.device) -> Tensor:
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


class Estimate(NamedTuple):
    """What an estimator gives: fresh tensors in the layout and dtype of its inputs."""

    advantage: Tensor
    """What the policy's loss weighs log-probabilities with."""
    value_target: Tensor
    """What the value network is regressed on."""


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float | Tensor,
    lam: float | Tensor,
    active: Tensor | None = None,
    batch_first: bool = False,
    differentiable: bool = False,
) -> Estimate:
    """Generalized advantage estimation (Schulman et al., 2016).

    ```
    δ_t = r_t + γ·V'_t − V_t
    A_t = δ_t + γ·λ·A_{t+1}        A_{t+1} = 0 where t terminated, truncated or is the last
    advantage = A_t,  value_target = A_t + V_t
    ```
    """
    given = Trace(reward, value, next_value, terminated, truncated, active)
    rollout, discount = _check_trace(given, gamma, batch_first)
    trace = _per_step("lam", lam, given, batch_first)
    recursion = Recursion(discount, trace, base=1)
    return _estimate(lambda_returns(rollout, recursion, differentiable=differentiable), batch_first)


def td_lambda(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float | Tensor,
    lam: float | Tensor,
    active: Tensor | None = None,
    batch_first: bool = False,
    differentiable: bool = False,
) -> Estimate:
    """TD(λ) returns.

    ```
    G_t = r_t + γ·((1 − λ)·V'_t + λ·G_{t+1})     within an episode
    G_t = r_t + γ·V'_t                           where t terminated, truncated or is the last
    advantage = G_t − V_t,  value_target = G_t
    ```

    Equal to :func:`gae` where V'_t = V_{t+1} within every episode; different where next values come from another
    network than values, a target network for one. ``lam=1.0`` gives Monte Carlo returns: ``next_value`` is then read
    only where an episode is truncated or cut by the end of the rollout.
    """
    given = Trace(reward, value, next_value, terminated, truncated, active)
    rollout, discount = _check_trace(given, gamma, batch_first)
    trace = _per_step("lam", lam, given, batch_first)
    recursion = Recursion(discount, trace, base=0)
    return _estimate(lambda_returns(rollout, recursion, differentiable=differentiable), batch_first)


def n_step(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float | Tensor,
    n: int,
    active: Tensor | None = None,
    batch_first: bool = False,
    differentiable: bool = False,
) -> Estimate:
    """n-step returns; ``n=1`` is the one-step temporal difference, TD(0).

    ```
    G¹_t = r_t + γ·V'_t
    Gᵐ_t = r_t + γ·Gᵐ⁻¹_{t+1}    within an episode
    Gᵐ_t = r_t + γ·V'_t          where t terminated, truncated or is the last
    advantage = Gⁿ_t − V_t,  value_target = Gⁿ_t
    ```
    """
    if n < 1:
        raise ConfigError(f"n: expected at least 1 step, got {n}")
    rollout, discount = _check_trace(
        Trace(reward, value, next_value, terminated, truncated, active), gamma, batch_first
    )
    return _estimate(sum_steps(rollout, gamma=discount, n=n, differentiable=differentiable), batch_first)


def vtrace(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    log_ratio: Tensor,
    *,
    gamma: float | Tensor,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    active: Tensor | None = None,
    batch_first: bool = False,
    differentiable: bool = False,
) -> Estimate:
    """V-trace (Espeholt et al., 2018): off-policy corrected targets.

    ```
    ρ_t = min(ρ̄, π(a_t|s_t) / μ(a_t|s_t)),   c_t = min(c̄, π(a_t|s_t) / μ(a_t|s_t))
    d_t = ρ_t·(r_t + γ·V'_t − V_t) + γ·c_t·d_{t+1}      d_{t+1} = 0 where t terminated, truncated or is the last
    advantage = ρ_t·(r_t + γ·(V'_t + d_{t+1}) − V_t),  value_target = V_t + d_t
    ```

    The arguments that are not listed are those of every estimator.

    Args:
        log_ratio: log π(a_t|s_t) − log μ(a_t|s_t): the learner's log-probability minus the actor's.
        rho_clip: ρ̄, which fixes the policy whose value is learned.
        c_clip: c̄, which trades the speed of contraction for variance.
    """
    if not (rho_clip > 0 and c_clip > 0):
        raise ConfigError(f"rho_clip, c_clip: expected positive numbers, got {rho_clip} and {c_clip}")
    rollout, discount = _check_trace(
        Trace(reward, value, next_value, terminated, truncated, active), gamma, batch_first
    )
    _like("log_ratio", log_ratio, reward)
    ratio = (log_ratio.transpose(0, 1) if batch_first else log_ratio).exp()
    recursion = Recursion(discount, 1.0, base=1, rho_clip=rho_clip, c_clip=c_clip)
    return _estimate(lambda_returns(rollout, recursion, ratio, differentiable=differentiable), batch_first)


def _check_trace(rollout: Trace, gamma: float | Tensor, batch_first: bool) -> tuple[Trace, float | Tensor]:
    """Return the rollout time-major, and the discount: one number, or (T, N) in the rollout's dtype."""
    reward, layout = rollout.reward, "(N, T)" if batch_first else "(T, N)"
    if reward.dim() != 2:
        raise ShapeError(f"reward: expected {layout}, got {tuple(reward.shape)}; {_shape_hint(tuple(reward.shape))}")
    if reward.dtype not in (torch.float32, torch.float64):
        raise DtypeError(f"reward: expected float32 or float64, got {reward.dtype}; convert it with .float()")
    for name in ("value", "next_value"):
        _like(name, getattr(rollout, name), reward)
    for name in ("terminated", "truncated", "active"):
        flag = getattr(rollout, name)
        if flag is not None:
            _same_shape(name, flag, reward)
            if flag.dtype != torch.bool:
                raise DtypeError(f"{name}: expected torch.bool, got {flag.dtype}; convert it with .bool()")
    discount = _per_step("gamma", gamma, rollout, batch_first)
    if batch_first:
        rollout = Trace(*(None if tensor is None else tensor.transpose(0, 1) for tensor in rollout))  # type: ignore[arg-type]  # None stays where None was: active only
    return rollout, discount


def _per_step(name: str, given: float | Tensor, rollout: Trace, batch_first: bool) -> float | Tensor:
    """Return one number, or (T, N) in the rollout's dtype, from 0 to 1; the rollout is as it was passed."""
    reward = rollout.reward
    if not isinstance(given, Tensor) or given.numel() == 1 != reward.numel():
        return _unit(name, given)
    _same_shape(name, given, reward)
    numbers = given.detach().to(reward.dtype)
    if rollout.active is not None:
        numbers = numbers.masked_fill(~rollout.active, 0)  # what suspended steps hold there is not read, either
    wrong = int((~((numbers >= 0) & (numbers <= 1))).sum())
    if wrong:
        raise ConfigError(f"{name}: expected numbers from 0 to 1, got {wrong} that are not")
    return numbers.transpose(0, 1) if batch_first else numbers


def _estimate(result: tuple[Tensor, Tensor], batch_first: bool) -> Estimate:
    if batch_first:
        return Estimate(*(tensor.transpose(0, 1).contiguous() for tensor in result))
    return Estimate(*result)


def _like(name: str, tensor: Tensor, reward: Tensor) -> None:
    _same_shape(name, tensor, reward)
    if tensor.dtype != reward.dtype:
        raise DtypeError(f"{name}: expected {reward.dtype} as reward has, got {tensor.dtype}; convert one of them")


def _same_shape(name: str, tensor: Tensor, reward: Tensor) -> None:
    got, expected = tuple(tensor.shape), tuple(reward.shape)
    if got != expected:
        raise ShapeError(f"{name}: expected {expected} as reward has, got {got}; {_shape_hint(got)}")
    if tensor.device != reward.device:
        raise DeviceError(f"{name}: expected a tensor on {reward.device} as reward is, got one on {tensor.device}")


def _shape_hint(shape: tuple[int, ...]) -> str:
    if len(shape) == 3 and shape[-1] == 1:
        return "drop the trailing dimension with .squeeze(-1)"
    return "pass one number per step and environment"


def _unit(name: str, number: float | Tensor) -> float:
    if isinstance(number, Tensor) and number.numel() != 1:
        raise ShapeError(f"{name}: expected one number for all steps, got a tensor {tuple(number.shape)}")
    if not 0 <= number <= 1:
        raise ConfigError(f"{name}: expected a number from 0 to 1, got {number}")
    return float(number)
