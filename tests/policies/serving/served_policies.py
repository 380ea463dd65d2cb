"""Policies and evaluations for the tests of serving, importable by name so that another process can make them."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor, nn

import headrace
from headrace.envs.task import Rows
from headrace.envs.tasks.cartpole import Cartpole, CartpoleCfg
from headrace.evaluation import PlayCfg
from headrace.policies import Batching, RemoteEngine
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs

STRICT = Batching(mode="strict", size=8)


class ToldCartpole(Cartpole):
    """Cartpole with an instruction per episode, of three."""

    def instructions(self, rows: Rows) -> list[str]:
        return [f"keep it {('calm', 'left', 'right')[episode % 3]}" for episode in rows.episode_ids.tolist()]


if "cartpole-told" not in headrace.task_names():
    headrace.register_task(
        headrace.TaskEntry(name="cartpole-told", task=ToldCartpole, cfg=CartpoleCfg, summary="for tests")
    )


class Denoiser(nn.Module):
    """A small diffusion policy: pictures, state and words in; noise is taken away in four steps.

    Its bits change with the shape of a batch, and its noise with the identity of a row.
    """

    obs_steps = 1

    def __init__(self, obs_dim: int, action_dim: int, *, horizon: int = 8, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.horizon, self.action_dim = horizon, action_dim
        self.see = nn.Linear(obs_dim + 1, width)
        self.steps = nn.Parameter(torch.randn(horizon, width))
        self.enter = nn.Linear(action_dim, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.leave = nn.Linear(width, action_dim)

    def forward(self, obs: Obs, context: ChunkContext) -> Tensor:
        rows = obs["policy"].flatten(1)
        seen = [rows.float() / 255 if rows.dtype == torch.uint8 else rows.clamp(-5.0, 5.0)]
        words = [sum(map(ord, text)) % 97 / 97 for text in context.instructions]
        seen.append(torch.tensor(words, device=seen[0].device)[:, None])
        memory = self.see(torch.cat(seen, dim=1))[:, None] + self.steps
        plan = context.noise(self.horizon, self.action_dim)
        for step in range(4):
            plan = plan + 0.3 * self.leave(self.layer(memory + self.enter(plan)))
            plan = plan + 0.05 * context.noise(self.horizon, self.action_dim, stream=f"denoising {step}")
        return torch.tanh(plan)


def play_remotely(address: str, task: str, first: int, count: int, num_envs: int, seed: int) -> list[list[object]]:
    """Rows of the table of episodes ``first``, …, as JSON has them; floats are exact in it."""
    overrides = {"episode_length": 60}
    env = headrace.make(task, num_envs, threads=1, autoreset="disabled", final_obs=False, overrides=overrides)
    with RemoteEngine(address) as engine:
        found = headrace.evaluate(
            env,
            engine.policy,
            episodes=range(first, first + count),
            seed=seed,
            play=PlayCfg(engine=engine),
            progress=False,
        )
    env.close()
    return [[e.episode_id, e.seed, e.reward, e.length, e.success, e.diverged] for e in found.episodes]


if __name__ == "__main__":
    address, task, *numbers = sys.argv[1:]
    print(json.dumps(play_remotely(address, task, *map(int, numbers))))
