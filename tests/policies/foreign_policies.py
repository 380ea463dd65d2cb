"""Policies that another interpreter makes, which has numpy, torch and gymnasium, but no headrace of its own."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn


class Seeing(nn.Module):
    """Convolutions over pictures, attention over their patches, and noise: its bits change with the size of a batch."""

    horizon, action_dim, obs_steps = 6, 1, 1

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.look = nn.Sequential(nn.Conv2d(6, 8, 5, 4), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU())
            layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
            self.think = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.act = nn.Linear(16 + self.horizon, self.horizon)

    def forward(self, obs: dict[str, Tensor], context: Any) -> Tensor:
        seen = self.look(obs["policy"].movedim(-1, 1).float() / 255).flatten(2).transpose(1, 2)
        noise = context.noise(self.horizon)
        return torch.tanh(self.act(torch.cat((self.think(seen).mean(1), noise), dim=1)))[..., None]


class Remembers:
    """Counts the chunks of an episode; draws from torch's global generator where ``draws``."""

    horizon, action_dim, obs_steps, draws = 6, 1, 1, False

    def __init__(self) -> None:
        self.chunks: dict[tuple[int, int], int] = {}

    def begin(self, rows: Any) -> None:
        self.chunks.update(dict.fromkeys(rows.keys(), 0))

    def end(self, rows: Any) -> None:
        for key in rows.keys():  # noqa: SIM118  # not a dict
            del self.chunks[key]

    def __call__(self, obs: dict[str, Tensor], context: Any) -> Tensor:
        keys = list(zip(context.seeds.tolist(), context.episode_ids.tolist(), strict=True))
        plan = torch.zeros(len(keys), 6, 1)
        for row, key in enumerate(keys):
            if key in self.chunks:
                self.chunks[key] += 1
                plan[row] = 0.1 * self.chunks[key]
        return plan + torch.randn(1) if self.draws else plan


class Draws(Remembers):
    draws = True


class Fails:
    """Raises, exits or sleeps at chunk 1, after a line on standard error."""

    horizon, action_dim, obs_steps, fault = 6, 1, 1, "raises"

    def __call__(self, obs: dict[str, Tensor], context: Any) -> Tensor:
        if int(context.chunk_index.max()) >= 1:
            print("the model ran out of luck", file=sys.stderr, flush=True)
            if self.fault == "exits":
                os._exit(3)
            if self.fault == "sleeps":
                time.sleep(600)
            raise ValueError("no such action")
        return torch.zeros(len(context), 6, 1)


class Exits(Fails):
    fault = "exits"


class Sleeps(Fails):
    fault = "sleeps"
