"""``rsl_rl.env.VecEnv`` over ``BatchEnv``."""

from __future__ import annotations

from typing import Any

import torch
from rsl_rl.env import VecEnv
from tensordict import TensorDict
from torch import Tensor

from headrace.adapters.stepping import LearnerEnv, float_picture, picture


class RslRlEnv(VecEnv):
    """Observation groups as a ``TensorDict``, pictures as float32 (N, C, H, W); ``time_outs`` marks truncations.

    rsl_rl never resets an environment: the first episodes begin here.
    """

    def __init__(self, core: LearnerEnv) -> None:
        self.core = core
        self.num_envs = core.num_envs
        self.num_actions = core.action_dim
        self.max_episode_length = core.env.task.cfg.episode_length
        self.device = core.device
        self.cfg = {}
        self._pictures = {name for name, shape in core.groups.items() if picture(shape)}
        self._read = sorted({"policy", core.critic_group})
        core.reset()

    @property
    def episode_length_buf(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  # read from the env
        """int64 (N,): steps taken in each episode."""
        return self.core.env.episode_steps

    def get_observations(self) -> TensorDict:
        """The newest observation."""
        return self.grouped(self.core.obs)

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Observation, reward (N,), dones int64 (N,), and ``time_outs`` bool (N,)."""
        # rsl_rl collects in inference mode, whose tensors cannot be changed in place later: the environment's must not
        # be such
        with torch.inference_mode(False), torch.no_grad():
            step = self.core.step(actions.clone())
            ended = step.terminated | step.truncated
            return self.grouped(step.obs), step.reward, ended.long(), {"time_outs": step.truncated & ~step.terminated}

    def grouped(self, obs: dict[str, Tensor]) -> TensorDict:
        """The groups that actor and critic read."""
        chosen = {name: float_picture(obs[name]) if name in self._pictures else obs[name] for name in self._read}
        return TensorDict(chosen, [len(next(iter(chosen.values())))], device=self.device)  # pyright: ignore[reportArgumentType]  # TensorDict takes a plain dict
