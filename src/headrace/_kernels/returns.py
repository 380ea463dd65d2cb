"""The return recursions: numba on the CPU, Warp on CUDA, plain torch elsewhere. One door for all three.

Every function takes checked tensors (T, N) of one float dtype on one device, flags as bool, ``active`` as bool (T, N)
or None where every step counts, and gives ``(advantage, value_target)``: fresh, time-major, (T, N), without gradients,
0 where not active. ``headrace.learning._returns`` is the checked front; the recursions are written there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._kernels import returns_reference as reference
from headrace.errors import require_extra

Returns: TypeAlias = tuple[Tensor, Tensor]

_SHARE = 1 << 18
"""Fewer steps are done before a sleeping thread has woken up."""


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    active: Tensor | None,
    *,
    gamma: float,
    lam: float,
) -> Returns:
    """Generalized advantage estimation."""
    tensors = (reward, value, next_value, terminated, truncated)
    if reward.device.type == "cpu":
        from headrace._kernels import returns_numba

        return _numba(returns_numba.gae, tensors, active, (gamma, lam))
    if reward.device.type == "cuda":
        return warp_gae(*tensors, active, gamma=gamma, lam=lam)
    return reference.gae(*tensors, _all_active(active, reward), gamma=gamma, lam=lam)


def td_lambda(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    active: Tensor | None,
    *,
    gamma: float,
    lam: float,
) -> Returns:
    """TD(λ) returns; with λ = 1 no next value is read except where a trajectory is truncated or cut."""
    tensors = (reward, value, next_value, terminated, truncated)
    if reward.device.type == "cpu":
        from headrace._kernels import returns_numba

        return _numba(returns_numba.td_lambda, tensors, active, (gamma, lam))
    if reward.device.type == "cuda":
        return warp_td_lambda(*tensors, active, gamma=gamma, lam=lam)
    return reference.td_lambda(*tensors, _all_active(active, reward), gamma=gamma, lam=lam)


def n_step(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    active: Tensor | None,
    *,
    gamma: float,
    n: int,
) -> Returns:
    """n-step returns. Work grows with min(n, T)."""
    tensors = (reward, value, next_value, terminated, truncated)
    n = min(n, max(reward.shape[0], 1))
    if reward.device.type == "cpu":
        from headrace._kernels import returns_numba

        return _numba(returns_numba.n_step, tensors, active, (gamma,), count=n)
    if reward.device.type == "cuda":
        return warp_n_step(*tensors, active, gamma=gamma, n=n)
    return reference.n_step(*tensors, _all_active(active, reward), gamma=gamma, n=n)


def vtrace(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    active: Tensor | None,
    ratio: Tensor,
    *,
    gamma: float,
    rho_clip: float,
    c_clip: float,
) -> Returns:
    """V-trace; ``ratio`` is π(a|s) / μ(a|s), (T, N)."""
    tensors = (reward, value, next_value, terminated, truncated)
    if reward.device.type == "cpu":
        from headrace._kernels import vtrace_numba

        return _numba(vtrace_numba.vtrace, tensors, active, (gamma, rho_clip, c_clip), ratio=ratio)
    if reward.device.type == "cuda":
        return warp_vtrace(*tensors, active, ratio, gamma=gamma, rho_clip=rho_clip, c_clip=c_clip)
    live = _all_active(active, reward)
    return reference.vtrace(*tensors, live, ratio, gamma=gamma, rho_clip=rho_clip, c_clip=c_clip)


def warp_gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    active: Tensor | None,
    *,
    gamma: float,
    lam: float,
) -> Returns:
    """:func:`gae` by Warp, on whichever device the tensors are."""
    return _warp("gae", (reward, value, next_value, terminated, truncated), active, (gamma, lam))


def warp_td_lambda(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    active: Tensor | None,
    *,
    gamma: float,
    lam: float,
) -> Returns:
    """:func:`td_lambda` by Warp, on whichever device the tensors are."""
    return _warp("td_lambda", (reward, value, next_value, terminated, truncated), active, (gamma, lam))


def warp_n_step(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    active: Tensor | None,
    *,
    gamma: float,
    n: int,
) -> Returns:
    """:func:`n_step` by Warp, on whichever device the tensors are."""
    tensors = (reward, value, next_value, terminated, truncated)
    return _warp("n_step", tensors, active, (gamma,), count=n)


def warp_vtrace(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    active: Tensor | None,
    ratio: Tensor,
    *,
    gamma: float,
    rho_clip: float,
    c_clip: float,
) -> Returns:
    """:func:`vtrace` by Warp, on whichever device the tensors are."""
    tensors = (reward, value, next_value, terminated, truncated)
    return _warp("vtrace", tensors, active, (gamma, rho_clip, c_clip), ratio=ratio)


def _numba(
    kernel: Callable[..., None],
    tensors: tuple[Tensor, ...],
    active: Tensor | None,
    numbers: tuple[float, ...],
    *,
    count: int | None = None,
    ratio: Tensor | None = None,
) -> Returns:
    from headrace._kernels.compiled import run

    advantage, value_target = _outputs(tensors[0])
    scalar: Callable[[float], Any] = np.float32 if tensors[0].dtype == torch.float32 else np.float64
    steps, envs = tensors[0].shape
    run(
        kernel,
        envs,
        *map(_array, tensors),
        _every_step(envs) if active is None else _array(active),
        0 if active is None else 1,
        *(() if ratio is None else (_array(ratio),)),
        *map(scalar, numbers),
        *(() if count is None else (count,)),
        advantage.numpy(),
        value_target.numpy(),
        min_rows=_SHARE // max(steps, 1) + 1,
    )
    return advantage, value_target


def _warp(
    name: str,
    tensors: tuple[Tensor, ...],
    active: Tensor | None,
    numbers: tuple[float, ...],
    *,
    count: int | None = None,
    ratio: Tensor | None = None,
) -> Returns:
    wp = require_extra("warp", extra="warp", purpose="value estimation on CUDA")
    from headrace._kernels import returns_warp

    wp.init()

    reward = tensors[0]
    live, step = _activity(active, reward)
    advantage, value_target = _outputs(reward)
    if reward.numel() == 0:
        return advantage, value_target
    scalar = wp.float32 if reward.dtype == torch.float32 else wp.float64
    arrays = [tensor.detach().contiguous() for tensor in tensors]
    inputs: list[Any] = [*map(wp.from_torch, arrays), wp.from_torch(live), step]
    if ratio is not None:
        inputs.append(wp.from_torch(ratio.detach().contiguous()))
    inputs += map(scalar, numbers)
    if count is not None:
        inputs.append(count)
    wp.launch(
        getattr(returns_warp, name),
        dim=tuple(reward.shape) if name == "n_step" else reward.shape[1],
        inputs=inputs,
        outputs=[wp.from_torch(advantage), wp.from_torch(value_target)],
        device=wp.device_from_torch(reward.device),
        # on torch's stream, so that neither side waits
        stream=wp.stream_from_torch(reward.device) if reward.is_cuda else None,
    )
    return advantage, value_target


def _array(tensor: Tensor) -> NDArray[Any]:
    # asked one by one: at these sizes a detach that does nothing is a measurable part of the whole
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return (tensor if tensor.is_contiguous() else tensor.contiguous()).numpy()


@functools.lru_cache(maxsize=8)
def _every_step(envs: int) -> NDArray[np.bool_]:
    """The mask of steps that all count, one row; kernels only read it."""
    return np.ones((1, envs), dtype=np.bool_)


def _activity(active: Tensor | None, like: Tensor) -> tuple[Tensor, int]:
    """The mask a kernel indexes with ``t · step``: a single row where every step counts."""
    if active is None:
        return torch.ones((1, like.shape[1]), dtype=torch.bool, device=like.device), 0
    return active.contiguous(), 1


def _all_active(active: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool) if active is None else active


def _outputs(like: Tensor) -> Returns:
    shape, dtype, device = like.shape, like.dtype, like.device
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
