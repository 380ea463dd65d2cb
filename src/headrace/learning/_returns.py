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
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.errors import ConfigError, DeviceError, DtypeError, ShapeError
from headrace.learning import _return_recursions as recursions
from headrace.learning._return_recursions import Recursion, Trace, lambda_returns


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
    return _estimate(recursions.n_step(rollout, gamma=discount, n=n, differentiable=differentiable), batch_first)


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
