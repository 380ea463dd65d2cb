"""Actions, checked once at the boundary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from headrace._kernels.compiled import kernel
from headrace.errors import ActionError, ConfigError, DeviceError, DtypeError, ShapeError

_CHOICES = (torch.int64, torch.int32)
_FLOATS = (torch.float32, torch.float64)
_INTEGERS = (*_CHOICES, torch.int16, torch.int8, torch.uint8)


@kernel()
def take_rows(actions: NDArray[Any], ids: NDArray[np.int64], out: NDArray[np.float64]) -> bool:
    """Copy rows ``ids`` (n,) of ``actions`` (N, A) to ``out`` (n, A) as float64; whether all of them are finite."""
    fine = True
    for row in range(ids.shape[0]):
        env = ids[row]
        for column in range(actions.shape[1]):
            value = np.float64(actions[env, column])
            fine = fine and np.isfinite(value)
            out[row, column] = value
    return fine


def taken_actions(
    actions: Tensor, space: spaces.Box | spaces.Discrete, active_ids: Tensor | None, all_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the actions as :func:`checked_actions` gives them, and those of the active rows as a task wants them.

    The latter are fresh: float64 (n, A), or int64 (n,) for a Discrete space.
    """
    num_envs, device, rows = all_ids.shape[0], all_ids.device, all_ids if active_ids is None else active_ids
    actions = _of_right_kind(actions, space, num_envs, device)
    if device.type == "cpu" and actions.is_floating_point():
        # one pass instead of a check, a selection and a cast
        given = np.ascontiguousarray(actions.numpy())
        flat = given.reshape(num_envs, math.prod(given.shape[1:]))
        chosen = np.empty((rows.shape[0], flat.shape[1]))
        if take_rows(flat, rows.numpy(), chosen):
            return actions, torch.from_numpy(chosen.reshape(rows.shape[0], *given.shape[1:]))
    actions = checked_actions(actions, space, active_ids, num_envs, device)
    return actions, actions.index_select(0, rows).to(torch.float64 if actions.is_floating_point() else torch.int64)


def device_actions(
    actions: Tensor, space: spaces.Box | spaces.Discrete, active_ids: Tensor | None, all_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`taken_actions`, on a GPU and without waiting for it.

    Whether the values are fit is the third of what it returns, bool (n,) of the rows that are not: zeros, or the first
    choice, stand for them. Who reads it refuses them with :func:`refuse_actions`.
    """
    actions = _of_right_kind(actions, space, all_ids.shape[0], all_ids.device)
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
    """Return the actions as given, without a gradient, once they are known to be safe for the active environments.

    A Box of floats takes any finite number, as its environments do; out of range is refused for all other spaces.

    Args:
        actions: (N, A) floats for a Box space, (N,) integers for a Discrete one, integers for MultiDiscrete and integer
            Box spaces, integers or bool for MultiBinary.
        space: the space of one environment's action.
        active_ids: int64 (n,), or None when all are active. Other rows are not looked at.
        num_envs: N.
        device: where the actions must be.
    """
    actions = _of_right_kind(actions, space, num_envs, device)
    if (limits := _limits(space, device)) is None:
        # a finite sum has finite terms only; anything else (an overflow, too) is looked at closely
        if math.isfinite(float(actions.sum())):
            return actions
        fine, wish = torch.isfinite(actions), "finite numbers"
    else:
        low, high = limits
        wide = actions.to(torch.int64)
        fine = (wide >= low) & (wide <= high)
        if isinstance(low, int):
            wish = f"a choice in [{low}, {high + 1})"
        else:
            wish = f"values in [{low.tolist()}, {torch.as_tensor(high).tolist()}]"
    if not fine.all():
        bad = (~fine.reshape(num_envs, -1).all(dim=1)).nonzero().squeeze(1)
        if active_ids is not None:
            bad = bad[torch.isin(bad, active_ids)]
        if len(bad):
            first = int(bad[0])
            shown = ", ".join(str(int(i)) for i in bad[:8]) + (", …" if len(bad) > 8 else "")
            raise ActionError(
                f"actions: expected {wish}, got {actions[first].tolist()} for environment {first} "
                f"(bad rows: {shown}); nothing was stepped"
            )
    return actions


def _limits(space: spaces.Space[object], device: torch.device) -> tuple[Tensor | int, Tensor | int] | None:
    """Return the lowest and highest allowed value, int64 of the action's shape; None for a Box of floats."""
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start) + int(space.n) - 1
    if isinstance(space, spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    elif isinstance(space, spaces.MultiBinary):
        low, high = np.zeros(space.shape), np.ones(space.shape)
    elif isinstance(space, spaces.Box) and np.dtype(space.dtype).kind != "f":
        low, high = space.low, space.high
    else:
        return None
    return torch.as_tensor(low.astype(np.int64), device=device), torch.as_tensor(high.astype(np.int64), device=device)


def _of_right_kind(actions: Tensor, space: spaces.Space[object], num_envs: int, device: torch.device) -> Tensor:
    """Return the actions without a gradient, once it is known that they are a tensor of the right shape, device and
    dtype."""
    if not isinstance(actions, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers are not all typed
        raise DtypeError(
            f"actions: expected a torch tensor, got {type(actions).__name__}; "
            "use torch.as_tensor(actions), or gymnasium.make_vec for an environment that takes numpy arrays"
        )
    if actions.requires_grad:  # the simulator's memory must not become part of a policy's graph
        actions = actions.detach()
    expected = (num_envs, *(space.shape or ()))
    if actions.shape != expected:
        raise ShapeError(
            f"actions: expected {expected}, got {tuple(actions.shape)}; "
            "pass one row per environment, suspended ones included (their rows are ignored)"
        )
    if actions.device != device:
        raise DeviceError(f"actions: expected device {device}, got {actions.device}; use actions.to({str(device)!r})")
    if isinstance(space, spaces.Discrete):
        if actions.dtype not in _CHOICES:
            raise DtypeError(f"actions: expected int64 choices, got {actions.dtype}")
    elif isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        if actions.dtype not in _FLOATS:
            raise DtypeError(f"actions: expected float32 or float64, got {actions.dtype}; use actions.float()")
    elif actions.dtype not in _INTEGERS and not (actions.dtype == torch.bool and isinstance(space, spaces.MultiBinary)):
        raise DtypeError(f"actions: expected integers for {space}, got {actions.dtype}; use actions.long()")
    return actions


def action_size(space: spaces.Space[Any]) -> int:
    """Return numbers of one action: A of a Box (A,), 1 for a choice."""
    if isinstance(space, spaces.Discrete):
        return 1
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ConfigError(f"policy: expected an environment with actions (A,) of real numbers, or choices, got {space}")
    return space.shape[0]
