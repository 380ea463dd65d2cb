"""rl_games' ``IVecEnv`` over a batch of environments."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces
from rl_games.common.ivecenv import IVecEnv
from torch import Tensor

from headrace.adapters._learner import LearnerEnv
from headrace.rollout._groups import Shapes
from headrace.types import Obs

Rows: TypeAlias = "Tensor | dict[str, Tensor]"


class RlGamesEnv(IVecEnv):
    """``obs`` for the actor; ``states`` for the central value, where the critic reads other groups.

    Each is a tensor where one group is read, else a dict of them. Images are float32, channels first. ``time_outs``
    marks truncations.
    """

    def __init__(self, core: LearnerEnv) -> None:
        self.core = core
        self.has_states = core.read.critic_only

    def grouped(self, obs: Obs) -> dict[str, Rows]:
        """The observation of rl_games, from the groups."""
        read = {"obs": self._rows(obs, self.core.read.actor)}
        return read | {"states": self._rows(obs, self.core.read.critic)} if self.has_states else read

    def _rows(self, obs: Obs, groups: Shapes) -> Rows:
        rows = self.core.rows(obs, groups)
        return rows if len(rows) > 1 else next(iter(rows.values()))

    def reset(self) -> dict[str, Rows]:
        """Begin episodes everywhere."""
        return self.grouped(self.core.reset())

    def step(self, actions: Tensor) -> tuple[dict[str, Rows], Tensor, Tensor, dict[str, Any]]:
        """Observation, reward (N,), dones (N,), and ``time_outs`` (N,) where an episode was cut off: rl_games
        bootstraps only where it is told to."""
        turn = self.core.step(actions)
        infos = {"time_outs": turn.truncated} if turn.any_truncated else {}
        return self.grouped(turn.obs), turn.reward, turn.ended, infos

    def get_env_info(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the base gives nothing
        """Spaces of one environment."""
        found = {
            "observation_space": self.core.space(self.core.read.actor),
            "action_space": spaces.Box(-1.0, 1.0, (self.core.action_dim,), np.float32),
            "agents": 1,
            "value_size": 1,
        }
        return found | {"state_space": self.core.space(self.core.read.critic)} if self.has_states else found
