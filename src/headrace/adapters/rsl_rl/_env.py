"""``rsl_rl.env.VecEnv`` over a batch of environments."""

from __future__ import annotations

from typing import Any

import torch
from rsl_rl.env import VecEnv
from tensordict import TensorDict
from torch import Tensor

from headrace.adapters._learner import LearnerEnv
from headrace.envs._batch_env import BatchEnv

_UNKNOWN = 2**31 - 1
"""What a bridge says of the length of its episodes: nothing."""


class RslRlEnv(VecEnv):
    """Observation groups as a ``TensorDict``, images as float32 (N, C, H, W); ``time_outs`` marks truncations.

    rsl_rl never resets an environment: the first episodes begin here.
    """

    def __init__(self, core: LearnerEnv) -> None:
        self.core = core
        self.num_envs = core.num_envs
        self.num_actions = core.action_dim
        # rsl_rl reads it only to spread the first episodes' lengths, which our learner does not ask for
        self.max_episode_length = core.env.task.cfg.episode_length if isinstance(core.env, BatchEnv) else _UNKNOWN
        self.device = core.device
        self.cfg = {}
        self._outside = torch.inference_mode(False)
        self._no_dones = torch.zeros(core.num_envs, dtype=torch.int64, device=core.device)
        self._size = torch.Size([core.num_envs])
        core.reset()

    @property
    def episode_length_buf(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  # read from the env
        """int64 (N,): steps taken in each episode."""
        return self.core.env.episode_steps

    def get_observations(self) -> TensorDict:
        """The newest observation."""
        return self.grouped(self.core.obs)

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Observation, reward (N,), dones int64 (N,), and ``time_outs`` bool (N,) where an episode was cut off."""
        # rsl_rl collects in inference mode, whose tensors cannot be changed in place later: the environment's must not
        # be such
        with self._outside:
            torch.set_grad_enabled(False)  # until the block ends
            turn = self.core.step(actions)
            dones = turn.ended.long() if turn.any_ended else self._no_dones
            extras = {"time_outs": turn.truncated} if turn.any_truncated else {}  # bootstraps only where it is told to
            return self.grouped(turn.obs), turn.reward, dones, extras

    def grouped(self, obs: dict[str, Tensor]) -> TensorDict:
        """The groups that actor and critic read."""
        chosen = self.core.rows(obs, self.core.read.all)
        # the constructor checks and copies what is known to fit, which takes 3 % of a step
        count = len(next(iter(chosen.values())))
        size = self._size if count == self.num_envs else torch.Size([count])
        return TensorDict._new_unsafe(chosen, size, device=self.device)  # pyright: ignore[reportPrivateUsage]
