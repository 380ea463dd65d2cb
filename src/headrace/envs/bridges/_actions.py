"""Actions of bridged environments: checked as tensors, written to the exchange in the dtype of their space."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from headrace.envs._actions import checked_actions, checked_rows, refuse_bad_rows
from headrace.envs.bridges import child
from headrace.envs.bridges._exchange import Array, ExchangeLayout, group_leaves
from headrace.errors import ConfigError, DtypeError

ActionSpace: TypeAlias = "spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def as_action_space(space: spaces.Space[Any]) -> ActionSpace:
    """The space, once it is known to be one whose actions are an array."""
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return space
    raise ConfigError(
        f"action space: expected Box, Discrete, MultiDiscrete or MultiBinary, got {space}; "
        "wrap the environment with gymnasium.wrappers.TransformAction"
    )


def exchange_layout(num_envs: int, observations: spaces.Space[Any], actions: spaces.Space[Any]) -> ExchangeLayout:
    """What an exchange of environments with these spaces holds."""
    action_space = as_action_space(actions)
    return ExchangeLayout(
        num_envs=num_envs,
        leaves=group_leaves(observations),
        action_shape=tuple(action_space.shape or ()),
        action_dtype=np.dtype(action_space.dtype),
    )


def checked_bridge_actions(
    actions: Tensor, space: ActionSpace, active_ids: Tensor | None, num_envs: int, device: torch.device
) -> Tensor:
    """As :func:`headrace.envs._actions.checked_actions`, for the further action spaces of Gymnasium too.

    Integers for MultiDiscrete and integer Box spaces, integers or bool for MultiBinary; out of range is refused for
    all of them, as it is for Discrete. A Box of floats takes any finite number, as its environments do.
    """
    limits = _limits(space)
    if limits is None:
        return checked_actions(actions, space, active_ids, num_envs, device)
    actions = checked_rows(actions, space, num_envs, device)
    if actions.dtype not in _INTEGERS and not (actions.dtype == torch.bool and isinstance(space, spaces.MultiBinary)):
        raise DtypeError(f"actions: expected integers for {space}, got {actions.dtype}; use actions.long()")
    low, high = (limit.to(device) for limit in limits)
    wide = actions.to(torch.int64)
    fine = ((wide >= low) & (wide <= high)).flatten(1).all(dim=1)
    if not bool(fine.all()):
        refuse_bad_rows(actions, fine, active_ids, f"values in [{low.tolist()}, {high.tolist()}]")
    return actions


def idle_action(space: ActionSpace) -> Array:
    """What is played for an environment that must be stepped although nobody acts: zeros, or the nearest allowed."""
    return np.array(np.broadcast_to(child.idle_action(child.space_to_json(space)), space.shape or ()), space.dtype)


def _limits(space: ActionSpace) -> tuple[Tensor, Tensor] | None:
    """The lowest and highest allowed value, int64 of the action's shape; None where ``checked_actions`` knows them."""
    if isinstance(space, spaces.MultiDiscrete):
        low = torch.from_numpy(np.asarray(space.start, dtype=np.int64).copy())
        return low, low + torch.from_numpy(np.asarray(space.nvec, dtype=np.int64).copy()) - 1
    if isinstance(space, spaces.MultiBinary):
        zeros = torch.zeros(tuple(space.shape), dtype=torch.int64)
        return zeros, zeros + 1
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind != "f":
        return torch.from_numpy(space.low.astype(np.int64)), torch.from_numpy(space.high.astype(np.int64))
    return None
