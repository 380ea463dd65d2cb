"""Processes that learn together compute what one process does with all of their environments."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import headrace
from headrace.learning import PPO, PPOCfg
from headrace.learning.ranks import learn_together, read_ranks

ENVS = 8
CFG = PPOCfg(steps=24, epochs=1, minibatches=1, hidden=(16,), max_grad_norm=1e9)


def learn_once() -> dict[str, Any]:
    """Collect and learn once, with the noise that a single process would draw."""
    rank, ranks = read_ranks()
    own = ENVS // ranks
    noise = torch.Generator().manual_seed(5)

    def draw(mean: torch.Tensor, std: torch.Tensor, generator: object) -> torch.Tensor:
        del generator
        whole = torch.randn((ENVS, *mean.shape[1:]), generator=noise)
        return mean + std * whole[rank * own : (rank + 1) * own]

    torch.normal = draw  # type: ignore[assignment]  # for this process or test alone
    env = headrace.make("cartpole", own, seed=3, threads=1, episode_stride=ENVS)
    with learn_together():
        learner = PPO(env, CFG)
        ends = learner.collect()
        learner.improve()
        return {
            "gradients": [p.grad.flatten().tolist() for p in learner.policy.parameters() if p.grad is not None],
            "weights": {name: value.double().flatten().tolist() for name, value in learner.policy.state_dict().items()},
            "episodes": sorted(zip(ends.episode_ids.tolist(), ends.returns.tolist(), strict=True)),
            "rate": learner.optimizer.param_groups[0]["lr"],
        }


def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path, monkeypatch: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    known = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    monkeypatch.setattr(torch, "normal", torch.normal)  # put back after the test
    alone = learn_once()
    child = [sys.executable, __file__, str(tmp_path / "other")]
    with subprocess.Popen(child, env={**os.environ, **known, "RANK": "1"}) as other:
        for name, value in {**known, "RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        found = [json.loads(json.dumps(learn_once()))]
        assert other.wait() == 0
    found.append(json.loads((tmp_path / "other").read_text()))
    assert sorted(found[0]["episodes"] + found[1]["episodes"]) == [list(row) for row in alone["episodes"]]
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["rate"] == found[1]["rate"] == alone["rate"]
    for mine, other in zip(alone["gradients"], found[0]["gradients"], strict=True):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(mine), rtol=0, atol=1e-6)
    for name, mine in alone["weights"].items():
        torch.testing.assert_close(torch.tensor(found[0]["weights"][name]), torch.tensor(mine), rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(learn_once()))
