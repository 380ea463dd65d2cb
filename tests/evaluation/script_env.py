"""A vector environment whose actions say for which episode and step they were planned, and policies that plan so.

A stale action, one of another episode or one played twice is an error at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from flat import ask
from headrace.envs.episodic_env import StageTimer
from headrace.policies import Batching
from headrace.policies.engines import Reply, Request
from headrace.policies.protocol import ChunkContext
from headrace.types import EpisodeEnds, Ids, Obs, Step, StepInfo

EPISODE, STEP, CHUNK, ROW = range(4)


def length_of(episode: int) -> int:
    return 1 + (episode * 7) % 23


class ScriptEnv:
    """N slots that count. An episode ends after ``length_of(id)`` steps; actions must be for their episode and step."""

    autoreset = "disabled"
    fidelity = "native"
    reseeds = True
    frames_drawn = 0
    recipe = None
    single_action_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def __init__(self, num_envs: int, length_of: Callable[[int], int] = length_of, *, holds: bool = False) -> None:
        self.num_envs = num_envs
        self.device = torch.device("cpu")
        self.timer = StageTimer()
        self.length_of = length_of
        self.holds = holds
        self.suspended = torch.zeros(num_envs, dtype=torch.bool)
        self.parked = torch.ones(num_envs, dtype=torch.bool)
        self.episode = torch.full((num_envs,), -1)
        self.step_count = torch.zeros(num_envs, dtype=torch.int64)
        self.played: dict[int, list[tuple[int, int]]] = {}
        """Episode → (chunk, row) of each of its steps."""
        self.observed_steps: list[tuple[int, int]] = []
        """(episode, step) of every observation that was asked for."""
        self.interrupt_after: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> object:
        options = options or {}
        mask = options.get("reset_mask")
        ids = torch.arange(self.num_envs) if mask is None else torch.as_tensor(mask).nonzero().squeeze(1)
        self.episode[ids] = torch.as_tensor(options["episode_ids"])
        self.step_count[ids] = 0
        self.parked[ids] = False
        for episode in self.episode[ids].tolist():
            self.played[episode] = []
        return self._obs(), {}

    def step(self, actions: Tensor, observe: Tensor | None = None) -> Step:
        if self.interrupt_after is not None:
            self.interrupt_after -= 1
            if self.interrupt_after < 0:
                raise KeyboardInterrupt
        active = ~(self.suspended | self.parked)
        assert active.any(), "a step in which nobody acts is a waste"
        rewards = torch.zeros(self.num_envs, dtype=torch.float64)
        for slot in active.nonzero().squeeze(1).tolist():
            episode, step = int(self.episode[slot]), int(self.step_count[slot])
            planned = [int(number) for number in actions[slot].tolist()]
            if not self.holds:
                assert planned[EPISODE] == episode, f"an action of episode {planned[EPISODE]} is played in {episode}"
                assert planned[STEP] == step, f"an action for step {planned[STEP]} is played in step {step}"
            self.played[episode].append((planned[CHUNK], planned[ROW]))
            self.step_count[slot] += 1
            rewards[slot] = float(actions[slot].sum())
        if observe is not None:
            self._note((observe & active).nonzero().squeeze(1))
        length = torch.tensor([self.length_of(int(episode)) for episode in self.episode])
        done = active & (self.step_count >= length)
        info: StepInfo = {}
        ended = done.nonzero().squeeze(1)
        if len(ended):
            self.parked[ended] = True
            episodes = self.episode[ended].clone()
            info["ends"] = EpisodeEnds(
                env_ids=ended,
                episode_ids=episodes,
                returns=torch.tensor([float(sum(r + 1 for _, r in self.played[int(e)])) for e in episodes]).double(),
                lengths=self.step_count[ended].clone(),
                success=episodes % 3 != 0,
                diverged=torch.zeros(len(ended), dtype=torch.bool),
            )
        return Step(self._obs(), rewards.float(), done, torch.zeros_like(done), info)

    def observe(self, ids: Ids | None = None) -> Obs:
        rows = torch.arange(self.num_envs) if ids is None else torch.as_tensor(ids)
        rows = rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows
        self._note(rows)
        return {name: values.index_select(0, rows) for name, values in self._obs().items()}

    def instructions(self, ids: Ids | None = None) -> tuple[str, ...]:
        chosen = self.episode if ids is None else self.episode[torch.as_tensor(ids)]
        return tuple(f"count to {self.length_of(episode)}" for episode in chosen.tolist())

    def suspend(self, ids: Ids) -> None:
        self.suspended[torch.as_tensor(ids)] = True

    def resume(self, ids: Ids) -> None:
        ids = torch.as_tensor(ids)
        assert not self.parked[ids].any(), "an episode that has ended cannot go on"
        self.suspended[ids] = False

    def _obs(self) -> Obs:
        return {"policy": torch.stack([self.episode, self.step_count], dim=1).float()}

    def _note(self, rows: Tensor) -> None:
        self.observed_steps += list(zip(self.episode[rows].tolist(), self.step_count[rows].tolist(), strict=True))


@dataclass
class Planner:
    """Plans rows (episode, step, chunk, row), and checks all that it is told."""

    horizon: int
    execute: int
    offset: int = 0
    latency: int = 0
    obs_steps: int = 1
    action_dim: int = 4
    asked: list[tuple[int, int, int]] = field(default_factory=list)
    """(episode, chunk, step) of every row asked for."""
    check: bool = True

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        seen = obs["policy"]
        if self.obs_steps > 1:
            self._check_history(seen)
            seen = seen[:, -1]
        count = len(seen)
        rows = torch.arange(self.horizon)
        plan = torch.zeros(count, self.horizon, 4)
        plan[..., EPISODE] = context.episode_ids[:, None].float()
        plan[..., STEP] = seen[:, 1:2] + rows - self.offset
        plan[..., CHUNK] = context.chunk_index[:, None].float()
        plan[..., ROW] = rows.float()
        for i in (context.episode_ids >= 0).nonzero().squeeze(1).tolist():
            episode, chunk = int(context.episode_ids[i]), int(context.chunk_index[i])
            self.asked.append((episode, chunk, int(seen[i, 1])))
            if self.check:
                self._check(context, i, chunk, seen[i])
        return plan

    def _check(self, context: ChunkContext, i: int, chunk: int, seen: Tensor) -> None:
        assert int(seen[0]) == int(context.episode_ids[i])
        assert context.instructions[i].startswith("count to ")
        delay, length = int(context.delay[i]), int(context.left_over_length[i])
        rest = context.left_over[i]
        if chunk == 0:
            assert (delay, length) == (0, 0)
        else:
            assert delay == self.latency
            assert length == self.horizon - self.offset - self.execute
            assert rest[:length, STEP].tolist() == [int(seen[1]) + j for j in range(length)], "row 0 is now"
            assert (rest[:length, CHUNK] == chunk - 1).all()
            assert (rest[:length, EPISODE] == seen[0]).all()
        assert (rest[length:] == 0).all()

    def _check_history(self, seen: Tensor) -> None:
        assert seen.shape[1] == self.obs_steps
        for row in seen:  # those that fill a batch up are zeros
            now = int(row[-1, 1])
            assert row[:, 1].tolist() == [max(0, now - age) for age in reversed(range(self.obs_steps))]
            assert (row[:, 0] == row[-1, 0]).all()


class LateEngine:
    """An engine beside the physics whose answers come after a given number of polls: no clock, every race on demand."""

    overlaps = True
    strict_size = None

    def __init__(self, policy: Planner, delays: list[int]) -> None:
        self.policy = policy
        self.delays = delays
        self._reply: Reply | None = None
        self._polls = 0
        self.calls = 0
        self.sizes: list[int] = []

    @property
    def busy(self) -> bool:
        return self._reply is not None

    @property
    def pending(self) -> bool:
        return self.busy

    def submit(self, request: Request) -> None:
        assert self._reply is None
        answer = ask(self.policy, request.obs, request.context, Batching(mode="fast"))
        self._reply = Reply(request=request, answer=answer, seconds=0.0)
        self._polls = self.delays[self.calls % len(self.delays)] if self.delays else 0
        self.calls += 1
        self.sizes.append(len(request.context.env_ids))

    def poll(self, *, wait: bool) -> Reply | None:
        self._polls -= 1
        if self._polls > 0 and not wait:
            return None
        reply, self._reply = self._reply, None
        return reply

    def close(self) -> None:
        self._reply = None


def expected_plays(length: int, *, execute: int, offset: int, latency: int) -> list[tuple[int, int]]:
    """(chunk, row) of each step of an episode: chunk c is observed at step c·s and takes over d steps later."""
    plays = []
    for step in range(length):
        chunk = max(0, (step - latency) // execute)
        plays.append((chunk, offset + step - chunk * execute))
    return plays
