"""rl_games' ``IVecEnv`` over ``BatchEnv``."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from gymnasium import spaces
from rl_games.common.ivecenv import IVecEnv
from torch import Tensor

from headrace.adapters._stepping import LearnerEnv, channels_first, float_picture, picture
from headrace.types import Obs


class RlGamesEnv(IVecEnv):
    """``obs`` for the actor; ``states`` for the central value, where the task has a group ``critic``.

    Pictures are float32, channels first. ``time_outs`` marks truncations.
    """

    def __init__(self, core: LearnerEnv) -> None:
        self.core = core
        self.has_states = core.critic_group != "policy"

    def grouped(self, obs: Obs) -> dict[str, Tensor]:
        """The observation of rl_games, from the groups."""
        read = {"obs": self._rows(obs, "policy")}
        return read | {"states": self._rows(obs, self.core.critic_group)} if self.has_states else read

    def reset(self) -> dict[str, Tensor]:
        """Begin episodes everywhere."""
        return self.grouped(self.core.reset())

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Any]]:
        """Observation, reward (N,), dones (N,), and ``time_outs`` (N,) where an episode was cut off: rl_games
        bootstraps only where it is told to."""
        turn = self.core.step(actions)
        infos = {"time_outs": turn.truncated} if turn.any_truncated else {}
        return self.grouped(turn.obs), turn.reward, turn.ended, infos

    def get_env_info(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the base gives nothing
        """Spaces of one environment."""
        found = {
            "observation_space": self._space("policy"),
            "action_space": spaces.Box(-1.0, 1.0, (self.core.action_dim,), np.float32),
            "agents": 1,
            "value_size": 1,
        }
        return found | {"state_space": self._space(self.core.critic_group)} if self.has_states else found

    def _rows(self, obs: Obs, group: str) -> Tensor:
        return float_picture(obs[group]) if group in self.core.pictures else obs[group]

    def _space(self, group: str) -> spaces.Box:
        shape = self.core.groups[group]
        if picture(shape):
            return spaces.Box(0.0, 1.0, channels_first(shape), np.float32)
        return cast("spaces.Box", cast("spaces.Dict", self.core.env.single_observation_space).spaces[group])
