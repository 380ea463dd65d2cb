"""Actions, checked once at the boundary."""

from __future__ import annotations

import functools
import math
from types import ModuleType

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from headrace.errors import ActionError, DeviceError, DtypeError, ShapeError


def taken_actions(
    actions: Tensor, space: spaces.Box | spaces.Discrete, active_ids: Tensor | None, everyone: Tensor
) -> tuple[Tensor, Tensor]:
    """The actions as :func:`checked_actions` gives them, and those of the active rows as a task wants them.

    The latter are fresh: float64 (n, A), or int64 (n,) for a Discrete space.
    """
    num_envs, device, rows = everyone.shape[0], everyone.device, everyone if active_ids is None else active_ids
    if device.type == "cpu" and isinstance(space, spaces.Box):
        actions = _of_right_kind(actions, space, num_envs, device)
        # one pass instead of a check, a selection and a cast
        given = np.ascontiguousarray(actions.numpy())
        flat = given if given.ndim == 2 else given.reshape(num_envs, math.prod(given.shape[1:]))
        chosen = np.empty((rows.shape[0], flat.shape[1]))
        if _kernels().take_rows(flat, rows.numpy(), chosen):
            return actions, torch.from_numpy(chosen.reshape(-1, *given.shape[1:]) if given.ndim != 2 else chosen)
    actions = checked_actions(actions, space, active_ids, num_envs, device)
    return actions, actions.index_select(0, rows).to(torch.float64 if actions.is_floating_point() else torch.int64)


def device_actions(
    actions: Tensor, space: spaces.Box | spaces.Discrete, active_ids: Tensor | None, everyone: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`taken_actions`, on a GPU and without waiting for it.

    Whether the values are fit is the third of what it returns, bool (n,) of the rows that are not: zeros, or the first
    choice, stand for them. Who reads it refuses them with :func:`refuse_actions`.
    """
    actions = _of_right_kind(actions, space, everyone.shape[0], everyone.device)
    chosen = actions if active_ids is None else actions.index_select(0, active_ids)
    if isinstance(space, spaces.Discrete):
        low = int(space.start)
        fine, usual = (chosen >= low) & (chosen < low + int(space.n)), low
        return actions, torch.where(fine, chosen, usual).to(torch.int64), ~fine
    fine = torch.isfinite(chosen)
    rows = fine.reshape(chosen.shape[0], -1).all(dim=1)
    return actions, torch.where(fine, chosen, 0.0).to(torch.float64), ~rows


def refuse_actions(actions: Tensor, space: spaces.Box | spaces.Discrete, active_ids: Tensor | None) -> None:
    """Raise what is wrong with actions that :func:`device_actions` found unfit, after the step that used them."""
    try:
        checked_actions(actions, space, active_ids, actions.shape[0], actions.device)
    except ActionError as error:
        wrong = str(error).removesuffix("; nothing was stepped")
        raise ActionError(f"{wrong}; on a GPU this is found after the step: call reset() to start again") from None


def checked_actions(
    actions: Tensor, space: spaces.Space[object], active_ids: Tensor | None, num_envs: int, device: torch.device
) -> Tensor:
    """The actions as given, without a gradient, once they are known to be safe for the active environments.

    Args:
        actions: (N, A) floats for a Box space, (N,) integers for a Discrete one.
        space: the space of one environment's action.
        active_ids: int64 (n,), or None when all are active. Other rows are not looked at.
        num_envs: N.
        device: where the actions must be.
    """
    actions = _of_right_kind(actions, space, num_envs, device)
    if isinstance(space, spaces.Discrete):
        low, count = int(space.start), int(space.n)
        fine = (actions >= low) & (actions < low + count)
        wish = f"a choice in [{low}, {low + count})"
    else:
        # a finite sum has finite terms only; anything else (an overflow, too) is looked at closely
        if math.isfinite(float(actions.sum())):
            return actions
        fine = torch.isfinite(actions)
        wish = "finite numbers"
    if not fine.all():
        refuse_bad_rows(actions, fine.reshape(num_envs, -1).all(dim=1), active_ids, wish)
    return actions


def _of_right_kind(actions: Tensor, space: spaces.Space[object], num_envs: int, device: torch.device) -> Tensor:
    """The actions without a gradient, once it is known that they are a tensor of the right shape, device and dtype."""
    actions = checked_rows(actions, space, num_envs, device)
    if isinstance(space, spaces.Discrete):
        if actions.dtype not in (torch.int64, torch.int32):
            raise DtypeError(f"actions: expected int64 choices, got {actions.dtype}")
    elif actions.dtype not in (torch.float32, torch.float64):
        raise DtypeError(f"actions: expected float32 or float64, got {actions.dtype}; use actions.float()")
    return actions


def checked_rows(actions: Tensor, space: spaces.Space[object], num_envs: int, device: torch.device) -> Tensor:
    """The actions without a gradient, once it is known that they are a tensor of the right shape and device."""
    if not isinstance(actions, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers are not all typed
        raise DtypeError(
            f"actions: expected a torch tensor, got {type(actions).__name__}; "
            "use torch.as_tensor(actions), or gymnasium.make_vec for an environment that takes numpy arrays"
        )
    # the simulator's memory must not become part of a policy's graph
    actions = actions.detach()
    expected = (num_envs, *(space.shape or ()))
    if tuple(actions.shape) != expected:
        raise ShapeError(
            f"actions: expected {expected}, got {tuple(actions.shape)}; "
            "pass one row per environment, suspended ones included (their rows are ignored)"
        )
    if actions.device != device:
        raise DeviceError(f"actions: expected device {device}, got {actions.device}; use actions.to({str(device)!r})")
    return actions


def refuse_bad_rows(actions: Tensor, fine: Tensor, active_ids: Tensor | None, wish: str) -> None:
    bad = (~fine).nonzero().squeeze(1)
    if active_ids is not None:
        bad = bad[torch.isin(bad, active_ids)]
    if len(bad):
        first = int(bad[0])
        shown = ", ".join(str(int(i)) for i in bad[:8]) + (", …" if len(bad) > 8 else "")
        raise ActionError(
            f"actions: expected {wish}, got {actions[first].tolist()} for environment {first} "
            f"(bad rows: {shown}); nothing was stepped"
        )


@functools.cache
def _kernels() -> ModuleType:
    from headrace._kernels import episodes  # brings numba: on use

    return episodes
