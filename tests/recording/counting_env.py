"""A vector environment whose every number says where it comes from: episode and step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.types import EpisodeEnds, ResetRecord, Step, StepInfo, StepObserver, StepRecord

IMAGE = 8


def length_of(episode: int) -> int:
    return 2 + (episode * 7) % 11


def succeeded(episode: int) -> bool:
    return episode % 3 != 0


class CountingEnv:
    """N slots that count. Observation, action, reward and state are functions of (episode id, step) alone."""

    def __init__(self, num_envs: int, observers: Sequence[StepObserver], *, image: int = IMAGE) -> None:
        self.num_envs = num_envs
        self.observers = observers
        self.image = image
        self.active = torch.ones(num_envs, dtype=torch.bool)

    def reset(self, seed: int = 0) -> None:
        self.seed = seed
        self.episodes = torch.arange(self.num_envs)
        self.steps = torch.zeros(self.num_envs, dtype=torch.int64)
        self._tell_reset(torch.arange(self.num_envs))

    def _tell_reset(self, ids: Tensor) -> None:
        record = ResetRecord(
            env_ids=ids, episode_ids=self.episodes[ids], seed=self.seed, obs=self.obs(), states=self.states()[ids]
        )
        for observer in self.observers:
            observer.after_reset(record)

    def obs(self) -> dict:
        episodes, steps = self.episodes, self.steps
        pixels = torch.arange(self.image * self.image * 3).view(self.image, self.image, 3)
        camera = (pixels + (episodes * 16 + steps)[:, None, None, None]) % 256
        return {
            "policy": torch.stack([episodes, steps, episodes * 1000 + steps], 1).to(torch.float32),
            "camera": camera.to(torch.uint8),
            "inner": {
                "count": (episodes * 1000 + steps).to(torch.int64),
                "flags": torch.stack([steps % 2 == 0, episodes % 2 == 0], 1),
                "deep": {"half": (steps / 4).to(torch.float16)[:, None]},
            },
            "nothing": torch.zeros((self.num_envs, 3, 0), dtype=torch.int32),
        }

    def states(self) -> Tensor:
        return torch.stack([self.episodes, self.steps], 1).to(torch.float64) / 3

    def actions(self) -> Tensor:
        actions = torch.stack([self.episodes, self.steps], 1).to(torch.float32) * 0.1
        actions[~self.active] = float("nan")
        return actions

    def step(self) -> None:
        ids = torch.nonzero(self.active).flatten()
        if not len(ids):
            return
        actions, acted_in = self.actions(), self.episodes[ids].clone()
        self.steps[ids] += 1
        done = torch.zeros(self.num_envs, dtype=torch.bool)
        done[ids] = torch.tensor([int(self.steps[i]) >= length_of(int(self.episodes[i])) for i in ids])
        truncated = done & (self.episodes % 2 == 0)
        info: StepInfo = {}
        ended = torch.nonzero(done).flatten()
        if len(ended):
            ids_ended = self.episodes[ended].clone()
            info["ends"] = EpisodeEnds(
                env_ids=ended,
                episode_ids=ids_ended,
                returns=torch.zeros(len(ended), dtype=torch.float64),
                lengths=self.steps[ended].clone(),
                success=torch.tensor([succeeded(int(episode)) for episode in ids_ended]),
                diverged=torch.zeros(len(ended), dtype=torch.bool),
            )
        reward = torch.zeros(self.num_envs)
        reward[ids] = self.steps[ids].to(torch.float32) / 2
        record = StepRecord(
            env_ids=ids,
            episode_ids=acted_in,
            actions=actions,
            step=Step(self.obs(), reward, done & ~truncated, truncated, info),
            states=self.states()[ids],
            processed_actions=actions[ids].to(torch.float64) * 2,
        )
        for observer in self.observers:
            observer.after_step(record)
        # what was borrowed is no longer what it was: a recorder that kept a view would show it
        shown = record.step.obs
        for borrowed in (shown["policy"], shown["camera"], record.actions, reward):
            borrowed.zero_()
        if len(ended):
            self.episodes[ended] += self.num_envs
            self.steps[ended] = 0
            self._tell_reset(ended)
