"""``skrl.envs.wrappers.torch.Wrapper`` over ``BatchEnv``."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from skrl.envs.wrappers.torch import Wrapper
from torch import Tensor

from headrace.adapters._stepping import LearnerEnv, Turn, channels_first, float_picture, picture, true_next
from headrace.types import Obs


class SkrlEnv(Wrapper):
    """Columns (N, 1) for reward and flags; ``state()`` is the critic's group, None where a task has none.

    Pictures are rows of float32, channels first, as skrl keeps every observation flat. ``infos`` has the true last
    observations of ended episodes as ``final_observations`` and ``final_states``. skrl's trainer leaves them unused;
    :class:`headrace.adapters.skrl.SkrlLearner` bootstraps from them.
    """

    def __init__(self, core: LearnerEnv) -> None:
        super().__init__(core.env)
        self.core = core
        self.has_state = core.critic_group != "policy"
        self._spaces = {name: _space(core, name) for name in {"policy", core.critic_group}}
        none = torch.zeros(core.num_envs, 1, dtype=torch.bool, device=core.device)
        self._no_flags = none, none
        self._action_space = spaces.Box(-1.0, 1.0, (core.action_dim,), np.float32)

    @property
    def observation_space(self) -> spaces.Box:
        """Of the actor."""
        return self._spaces["policy"]

    @property
    def state_space(self) -> spaces.Box | None:
        """Of the critic."""
        return self._spaces[self.core.critic_group] if self.has_state else None

    @property
    def action_space(self) -> spaces.Box:
        """From -1 to 1."""
        return self._action_space

    def observation(self, obs: Obs) -> Tensor:
        """What the actor reads, (N, features)."""
        return self._flat(obs["policy"], "policy")

    def state(self) -> Tensor | None:
        """What the critic reads, (N, features); None where it is what the actor reads."""
        return self._flat(self.core.obs[self.core.critic_group], self.core.critic_group) if self.has_state else None

    def reset(self) -> tuple[Tensor, dict[str, Any]]:
        """Begin episodes everywhere."""
        return self.observation(self.core.reset()), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Observation, reward, terminated, truncated, infos. skrl adds to the reward in place: it is a fresh tensor."""
        turn = self.core.step(actions)
        infos = self._last(turn) if turn.any_ended else {}
        flags = self._no_flags
        if turn.any_ended:
            flags = turn.terminated.unsqueeze(1), turn.truncated.unsqueeze(1)
        return self.observation(turn.obs), turn.reward.unsqueeze(1), *flags, infos

    def render(self, *_: object, **__: object) -> NDArray[np.uint8]:
        """One tiled picture."""
        return self.core.env.render()

    def close(self) -> None:
        """The environment is its maker's to close."""

    def _last(self, turn: Turn) -> dict[str, Any]:
        critic = self.core.critic_group
        return {
            "final_observations": self._flat(true_next(turn, "policy"), "policy"),
            "final_states": self._flat(true_next(turn, critic), critic) if self.has_state else None,
        }

    def _flat(self, rows: Tensor, group: str) -> Tensor:
        return float_picture(rows).flatten(1) if group in self.core.pictures else rows


def _space(core: LearnerEnv, group: str) -> spaces.Box:
    shape = core.groups[group]
    if picture(shape):
        return spaces.Box(0.0, 1.0, channels_first(shape), np.float32)
    return cast("spaces.Box", cast("spaces.Dict", core.env.single_observation_space).spaces[group])
