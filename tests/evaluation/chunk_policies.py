"""Policies for the tests, importable by name so that another process can make them."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from script_env import Planner
from torch import Tensor, nn

from headrace.evaluation.scheduling import QueueState
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs


class Attention(nn.Module):
    """A small transformer over tokens of the observation, with noise: its bits change with the shape of a batch."""

    obs_steps = 1

    def __init__(self, obs_dim: int, action_dim: int, horizon: int = 12, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.horizon, self.action_dim = horizon, action_dim
        self.enter = nn.Linear(obs_dim + 4, width)
        self.steps = nn.Parameter(torch.randn(horizon, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.leave = nn.Linear(width, action_dim)

    def forward(self, obs: Obs, context: ChunkContext) -> Tensor:
        seen = obs["policy"].clamp(-5.0, 5.0)
        tokens = self.enter(torch.cat((seen, context.noise(4)), dim=1))[:, None] + self.steps
        return torch.tanh(self.leave(self.layer(tokens)))


class Broken:
    """Plans zeros, and misbehaves when it is asked for chunk ``at`` of an odd episode."""

    horizon, action_dim, obs_steps = 4, 4, 1

    def __init__(self, fault: str, at: int = 2, sign: str = "") -> None:
        self.fault = fault
        self.at = at
        self.sign = sign
        """A file that a policy that sleeps writes before it does."""

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        plan = torch.zeros(len(context.env_ids), 4, 4)
        bad = (context.chunk_index == self.at) & (context.episode_ids % 2 == 1)
        if not bad.any():
            return plan
        if self.fault == "raises":
            raise RuntimeError("the model is out of memory")
        if self.fault == "exits":
            sys.exit(3)
        if self.fault == "killed":
            os.kill(os.getpid(), 9)
        if self.fault == "nan":
            plan[bad, 1, 2] = float("nan")
        if self.fault == "infinite":
            plan[bad, 3, 0] = float("inf")
        if self.fault == "sleeps":
            Path(self.sign).touch()
            time.sleep(60)
        faults = {"rows": plan[:-1], "horizon": plan[:, :3], "width": plan[..., :2], "list": plan.tolist()}
        faults |= {"complex": plan.to(torch.complex64), "complex array": plan.numpy().astype(complex)}
        faults |= {"text array": plan.numpy().astype("<U1")}
        return faults.get(self.fault, plan)


class CannotBeMade:
    horizon, action_dim, obs_steps = 4, 4, 1

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        return torch.zeros(len(context.env_ids), 4, 4)

    def __setstate__(self, state: object) -> None:
        raise FileNotFoundError("no weights here")

    def __getstate__(self) -> object:
        return {"weights": 0}


class SlowStart:
    """Plans as :class:`Planner` does, but thinks for a while when it is first asked for chunk ``at``."""

    horizon, action_dim, obs_steps = 4, 4, 1

    def __init__(self, sign: str, at: int) -> None:
        self.sign = Path(sign)
        self.at = at

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        if bool((context.chunk_index == self.at).any()) and not self.sign.exists():
            self.sign.touch()
            time.sleep(0.5)
        return Planner(4, 4)(obs, context)


class Stubborn:
    """Counts its calls, has a length of zero, and does not end when it is asked to; with a ``sign``, it sleeps."""

    horizon, action_dim, obs_steps = 4, 4, 1

    def __init__(self, sign: str = "") -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.sign = sign
        self.calls = 0

    def __len__(self) -> int:
        return 0

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        self.calls += 1
        if self.sign:
            Path(self.sign).touch()
            time.sleep(60)
        return torch.full((len(context.env_ids), 4, 4), float(self.calls))


@dataclass(frozen=True)
class Every:
    """A rule of a user's own: who waits is inferred at every ``period``-th step of the batch, or when none can act."""

    period: int

    def infer(self, queue: QueueState) -> np.ndarray:
        due = queue.steps % self.period == 0 or not queue.can_act.any()
        return queue.waiting if due else queue.nobody


@dataclass(frozen=True)
class AtLeast:
    """One more: who waits is inferred once so many do, or when none can act."""

    count: int

    def infer(self, queue: QueueState) -> np.ndarray:
        enough = int(queue.waiting.sum()) >= self.count or not queue.can_act.any()
        return queue.waiting if enough else queue.nobody
