"""A chunk policy that reads: the words of an instruction become the goal of the policy for ``pusher-solid``."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from headrace.envs.registry import make_task
from headrace.envs.tasks.pusher import INSTRUCTIONS, PusherWordsCfg, goal_offsets
from headrace.policies.act import ActPolicy, instruction_numbers
from headrace.policies.load_policy import load_policy
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs


class PusherWordsPolicy(nn.Module):
    """Plays ``pusher-words``. Deterministic.

    Args:
        goal_range: that of the task.
    """

    obs_steps = 1
    policy_identity = "pusher-words-1"

    def __init__(self, goal_range: float = PusherWordsCfg.goal_range) -> None:
        super().__init__()
        self.act = cast("ActPolicy", load_policy("pusher-solid"))
        self.horizon, self.action_dim = self.act.horizon, self.act.action_dim
        model = make_task("pusher-words").model
        middle = torch.tensor(model.body_pos[model.body("goal").id], dtype=torch.float64)
        goals = middle.repeat(len(INSTRUCTIONS), 1)
        # the goal's joints are y first
        goals[:, :2] += goal_offsets(torch.arange(len(INSTRUCTIONS)), goal_range).flip(1)
        self.register_buffer("goals", goals.to(torch.float32))

    def forward(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan float32 (n, horizon, action_dim) of ``policy`` (n, 20) and the instructions."""
        rows, goals = obs["policy"], self.get_buffer("goals")[instruction_numbers(context, INSTRUCTIONS)]
        return self.act({"policy": torch.cat((rows, goals.to(rows)), dim=1)})
