"""The return recursions: numba on the CPU, Warp on CUDA, plain torch elsewhere. One door for all three.

Everything is (T, N), time-major, of one float dtype on one device. Results are fresh, without gradients, 0 where not
active. ``headrace.learning._returns`` is the checked front.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._device import warp_launches
from headrace.errors import require_extra

Returns: TypeAlias = tuple[Tensor, Tensor]
"""advantage and value target"""
Backend: TypeAlias = Literal["numba", "warp", "reference"]

_SHARE = 1 << 18
"""Fewer steps are done before a sleeping thread has woken up."""


class Rollout(NamedTuple):
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
    rollout: Rollout, recursion: Recursion, ratio: Tensor | None = None, *, backend: Backend | None = None
) -> Returns:
    """The recursion that GAE, TD(λ) and V-trace share, backwards over the active steps of each environment.

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
    gamma, lam, base, rho_clip, c_clip = recursion
    backend = backend or _backend(rollout, gamma)
    if backend != "numba":
        rollout = _fill_gaps(rollout)
    match backend:
        case "numba":
            from headrace._kernels import returns_numba

            scalar = _scalar(rollout)
            # None: V' counts once, which numba compiles apart
            weight = None if base else scalar(1 - lam)
            numbers = (scalar(gamma), scalar(lam), scalar(rho_clip), scalar(c_clip))
            return _numba(
                returns_numba.lambda_returns, rollout, None if ratio is None else _array(ratio), weight, numbers
            )
        case "warp":
            # kernels take no None: any array of the dtype does where there are no ratios
            extra = (rollout.reward if ratio is None else ratio, 0 if ratio is None else 1)
            numbers = (float(gamma), lam, base, rho_clip, c_clip)
            return _warp("lambda_returns", rollout, extra, numbers, rollout.reward.shape[1])
        case "reference":
            from headrace._kernels import returns_reference

            return returns_reference.lambda_returns(rollout, recursion, ratio)


def n_step(rollout: Rollout, *, gamma: float | Tensor, n: int, backend: Backend | None = None) -> Returns:
    """n-step returns. Work grows with min(n, T) on the CPU."""
    n = min(n, max(rollout.reward.shape[0], 1))
    backend = backend or _backend(rollout, gamma)
    if backend != "numba":
        rollout = _fill_gaps(rollout)
    match backend:
        case "numba":
            from headrace._kernels import returns_numba

            return _numba(returns_numba.n_step, rollout, _scalar(rollout)(gamma), n)
        case "warp":
            return _warp("n_step", rollout, (n,), (float(gamma),), tuple(rollout.reward.shape))
        case "reference":
            from headrace._kernels import returns_reference

            return returns_reference.n_step(rollout, gamma, n)


def _backend(rollout: Rollout, gamma: float | Tensor) -> Backend:
    if isinstance(gamma, Tensor):
        return "reference"
    device = rollout.reward.device.type
    return "numba" if device == "cpu" else "warp" if device == "cuda" else "reference"


def _fill_gaps(rollout: Rollout) -> Rollout:
    """Put V for V' where a trajectory was cut and V' is NaN; the CPU kernels do that on their way."""
    next_value = rollout.next_value
    active = torch.ones_like(rollout.terminated) if rollout.active is None else rollout.active
    is_last = active & (active.flip(0).cumsum(0).flip(0) == 1)
    gap = next_value.isnan() & (rollout.truncated | is_last)
    return rollout._replace(next_value=torch.where(gap, rollout.value, next_value).detach())


def _scalar(rollout: Rollout) -> Any:
    """The numpy type of one number of the rollout."""
    return np.float32 if rollout.reward.dtype == torch.float32 else np.float64


def _numba(kernel: Any, rollout: Rollout, *settings: Any) -> Returns:
    from headrace._kernels.compiled import run

    advantage, value_target = _outputs(rollout.reward)
    steps, envs = rollout.reward.shape
    arrays = tuple(_array(tensor) for tensor in rollout[:5])
    active = None if rollout.active is None else _array(rollout.active)
    outputs = advantage.numpy().reshape(-1), value_target.numpy().reshape(-1)
    if 0 < steps * envs < 2 * _SHARE:
        kernel(0, envs, (steps, envs), arrays, active, *settings, *outputs)
    elif steps:
        run(kernel, envs, (steps, envs), arrays, active, *settings, *outputs, min_rows=_SHARE // steps + 1)
    return advantage, value_target


def _warp(
    name: str, rollout: Rollout, extra: tuple[Any, ...], numbers: tuple[float, ...], dim: int | tuple[int, ...]
) -> Returns:
    wp = require_extra("warp", extra="warp", purpose="value estimation on CUDA")
    from headrace._kernels import returns_warp

    wp.init()
    reward = rollout.reward
    advantage, value_target = _outputs(reward)
    if reward.numel() == 0:
        return advantage, value_target
    # an index of t·step reads one row again and again where every step counts
    active, step = (rollout.active, 1) if rollout.active is not None else (torch.ones_like(rollout.terminated[:1]), 0)
    scalar = wp.float32 if reward.dtype == torch.float32 else wp.float64
    inputs = [*rollout[:5], active, step, *extra]
    # Warp's view of a tensor does not keep it alive
    tensors = [item.detach().contiguous() if isinstance(item, Tensor) else item for item in inputs]
    with warp_launches(reward.device) as device:
        wp.launch(
            getattr(returns_warp, name),
            dim=dim,
            inputs=[*(wp.from_torch(t) if isinstance(t, Tensor) else t for t in tensors), *map(scalar, numbers)],
            outputs=[wp.from_torch(advantage), wp.from_torch(value_target)],
            device=device,
        )
    return advantage, value_target


def _array(tensor: Tensor) -> NDArray[Any]:
    # asked one by one: at these sizes a detach that does nothing is a measurable part of the whole
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return (tensor if tensor.is_contiguous() else tensor.contiguous()).numpy().reshape(-1)


def _outputs(like: Tensor) -> Returns:
    shape, dtype, device = like.shape, like.dtype, like.device
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
