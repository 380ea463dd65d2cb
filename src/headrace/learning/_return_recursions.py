"""The return recursions: numba on the CPU, Warp on CUDA, plain torch elsewhere. One door for all three.

Everything is (T, N), time-major, of one float dtype on one device. Results are fresh, without gradients, 0 where not
active. ``headrace.learning._returns`` is the checked front.
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from headrace.errors import require_extra

Returns: TypeAlias = tuple[Tensor, Tensor]
"""advantage and value target"""
Backend: TypeAlias = Literal["numba", "warp", "reference"]


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
    lam: float
    base: int
    """1: x is what a step adds to V (GAE, V-trace). 0: x is the return itself (TD(λ)), where V' counts 1 − λ times."""
    rho_clip: float = 1.0
    c_clip: float = 1.0


def lambda_returns(
    rollout: Trace, recursion: Recursion, ratio: Tensor | None = None, *, backend: Backend | None = None
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
    module, rollout = _backend(backend, rollout, recursion.gamma)
    return module.lambda_returns(rollout, recursion, ratio)


def n_step(rollout: Trace, *, gamma: float | Tensor, n: int, backend: Backend | None = None) -> Returns:
    """n-step returns. Work grows with min(n, T) on the CPU."""
    module, rollout = _backend(backend, rollout, gamma)
    return module.n_step(rollout, gamma, min(n, max(rollout.reward.shape[0], 1)))


def _backend(backend: Backend | None, rollout: Trace, gamma: float | Tensor) -> tuple[ModuleType, Trace]:
    """Return the module that computes, and the rollout as it takes it."""
    device = rollout.reward.device.type
    if backend == "numba" or (backend is None and device == "cpu" and not isinstance(gamma, Tensor)):
        from headrace.learning import _returns_numba as returns_numba

        return returns_numba, rollout
    if backend == "warp" or (backend is None and device == "cuda" and not isinstance(gamma, Tensor)):
        require_extra("warp", extra="warp", purpose="value estimation on CUDA")
        from headrace.learning import _returns_warp as module
    else:
        from headrace.learning import _returns_reference as module
    # no None, and V for V' where a trajectory was cut and V' is NaN; the CPU kernels do that on their way
    active = torch.ones_like(rollout.terminated) if rollout.active is None else rollout.active
    is_last = active & (active.flip(0).cumsum(0).flip(0) == 1)
    gap = rollout.next_value.isnan() & (rollout.truncated | is_last)
    next_value = torch.where(gap, rollout.value, rollout.next_value).detach()
    return module, rollout._replace(next_value=next_value, active=active)


def empty_returns(reward: Tensor) -> Returns:
    """Memory for a backend's results."""
    shape, dtype, device = reward.shape, reward.dtype, reward.device
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
