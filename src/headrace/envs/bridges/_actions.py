"""Action spaces of bridged environments, and the layout of the exchange that their spaces make."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from headrace.envs.bridges import child
from headrace.envs.bridges._exchange import Array, ExchangeLayout, group_leaves
from headrace.errors import ConfigError

ActionSpace: TypeAlias = "spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary"


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


def idle_action(space: ActionSpace) -> Array:
    """What is played for an environment that must be stepped although nobody acts: zeros, or the nearest allowed."""
    return np.array(np.broadcast_to(child.idle_action(child.space_to_json(space)), space.shape or ()), space.dtype)
