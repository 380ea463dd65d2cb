"""``skrl.envs.wrappers.torch.Wrapper`` over a batch of environments."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from skrl.envs.wrappers.torch import Wrapper
from skrl.utils.spaces.torch import flatten_tensorized_space
from torch import Tensor

from headrace.adapters._learner import LearnerEnv, Turn, true_next
from headrace.rollout._groups import Shapes
from headrace.types import Obs


class SkrlEnv(Wrapper):
    """Columns (N, 1) for reward and flags; ``state()`` is what the critic reads, None where the actor
    reads the same.

    Several groups are one flat row, images float32 with channels first, as skrl keeps every observation. ``infos``
    has the true last observations of ended episodes as ``final_observations`` and ``final_states``. skrl's trainer
    leaves them unused; our learner bootstraps from them.
    """

    def __init__(self, core: LearnerEnv) -> None:
        super().__init__(core.env)
        self.core = core
        self.has_state = core.read.critic_only
        self._observation_space, self._state_space = core.space(core.read.actor), core.space(core.read.critic)
        none = torch.zeros(core.num_envs, 1, dtype=torch.bool, device=core.device)
        self._no_flags = none, none
        self._action_space = spaces.Box(-1.0, 1.0, (core.action_dim,), np.float32)

    @property
    def observation_space(self) -> spaces.Box | spaces.Dict:
        """Of the actor."""
        return self._observation_space

    @property
    def state_space(self) -> spaces.Box | spaces.Dict | None:
        """Of the critic; None where it reads what the actor reads."""
        return self._state_space if self.has_state else None

    @property
    def action_space(self) -> spaces.Box:
        """From -1 to 1."""
        return self._action_space

    def observation(self, obs: Obs) -> Tensor:
        """What the actor reads, (N, features)."""
        return self._flat(obs, self.core.read.actor)

    def state(self) -> Tensor | None:
        """What the critic reads, (N, features); None where it is what the actor reads."""
        return self._flat(self.core.obs, self.core.read.critic) if self.has_state else None

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

    def render(self, *_: object, **__: object) -> NDArray[np.uint8] | None:
        """One tiled image."""
        return self.core.env.render()

    def close(self) -> None:
        """The environment is its maker's to close."""

    def _last(self, turn: Turn) -> dict[str, Any]:
        last = true_next(turn)
        return {
            "final_observations": self._flat(last, self.core.read.actor),
            "final_states": self._flat(last, self.core.read.critic) if self.has_state else None,
        }

    def _flat(self, obs: Obs, groups: Shapes) -> Tensor:
        """Rows of all groups, as skrl keeps every observation: flat, in the order of their names."""
        rows = self.core.rows(obs, groups)
        return cast("Tensor", flatten_tensorized_space(rows if len(rows) > 1 else next(iter(rows.values()))))
