"""Evaluate a policy that has LeRobot's interface, predict_action_chunk, with one inference a chunk.

The policy below stands where yours would: a module whose predict_action_chunk maps a batch of observations to
(n, chunk, action). Nothing has to be subclassed.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from torch import Tensor, nn

import headrace
from headrace import evaluate
from headrace.evaluation import PlayCfg
from headrace.policies import as_chunk_policy


class TinyAct(nn.Module):
    """Predicts 16 actions from the state. Untrained: what is shown here is the schedule, not the score."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 16))

    def predict_action_chunk(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tanh(self.net(batch["policy"]))[..., None]


def main() -> None:
    """Evaluate under the naive rule and under ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--num-envs", type=int, default=32)
    arguments = parser.parse_args()

    env = headrace.make("cartpole", arguments.num_envs, autoreset="disabled", final_obs=False)
    policy = as_chunk_policy(TinyAct(), horizon=16, action_dim=1)
    console = Console()
    for rule in ("whole-batch-on-any", "greedy"):
        result = evaluate(env, policy, episodes=arguments.episodes, play=PlayCfg(execute=16, admission=rule), seed=0)
        console.print(rule, result.summary())
    env.close()


if __name__ == "__main__":
    main()
