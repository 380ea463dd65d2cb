"""Policies for workers, importable by name: they plan at random, note their process, and end it where they are told."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from headrace import EnvRecipe
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs

OVERRIDES = {"episode_length": 60}
RECIPE = EnvRecipe("cartpole", num_envs=3, seed=5, threads=1, overrides=OVERRIDES)


class Shove(nn.Module):
    """Pushes the cart at random, through a layer whose bits depend on the batch."""

    horizon, action_dim, obs_steps = 8, 1, 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 64)
        self.leave = nn.Linear(64, 8)

    def forward(self, obs: Obs, context: ChunkContext) -> Tensor:
        planned = self.leave(torch.tanh(self.layer(obs["policy"]))) + context.noise(8, 1)[..., 0]
        return torch.tanh(planned)[..., None]


class Unlike(Shove):
    """Has other weights in every process."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.data += os.getpid()


@dataclass
class Deadly:
    """Ends its process with SIGKILL when it plans a chunk of an episode: ``times`` times over all processes."""

    directory: Path
    episode: int
    chunk: int = 1
    times: int = 1
    horizon: int = 8
    action_dim: int = 1
    obs_steps: int = 1

    def __post_init__(self) -> None:
        self.policy = Shove()

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        (self.directory / f"process-{os.getpid()}").touch()
        meets = (context.episode_ids == self.episode) & (context.chunk_index == self.chunk)
        if bool(meets.any()):
            for number in range(self.times):
                try:
                    (self.directory / f"killed-{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return self.policy(obs, context)

    @property
    def deaths(self) -> int:
        return len(list(self.directory.glob("killed-*")))

    @property
    def processes(self) -> list[int]:
        return [int(path.name.partition("-")[2]) for path in self.directory.glob("process-*")]


@dataclass
class Lonely:
    """Notes each worker that is made; stands still, once it is told so, until there are two."""

    directory: Path
    horizon: int = 8
    action_dim: int = 1
    obs_steps: int = 1

    def __post_init__(self) -> None:
        self.policy = Shove()

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        (self.directory / f"made-{os.getpid()}").touch()

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        (self.directory / f"played-{os.getpid()}").touch()
        deadline = time.monotonic() + 240.0
        while (self.directory / "wait").exists() and len(self.seen("made")) < 2:
            assert time.monotonic() < deadline, "nobody joined"
            time.sleep(0.05)
        return self.policy(obs, context)

    def seen(self, what: str) -> list[Path]:
        return list(self.directory.glob(f"{what}-*"))


@dataclass
class Confused:
    """Raises at one episode."""

    episode: int
    horizon: int = 8
    action_dim: int = 1
    obs_steps: int = 1

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        if bool((context.episode_ids == self.episode).any()):
            raise ValueError("no idea")
        return torch.zeros(len(context), 8, 1)
