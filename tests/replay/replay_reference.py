"""A store that keeps everything, slowly and obviously; and streams of steps to feed it and the fast one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.replay import ArraySpec
from headrace.types import StackSpec, Step


@dataclass
class Row:
    """One stored transition, whole."""

    obs: dict[str, Tensor]
    next_obs: dict[str, Tensor]
    action: Tensor
    reward: float
    terminated: bool
    truncated: bool
    cut: bool
    trajectory: int
    step: int


@dataclass
class NaiveStore:
    """Per-environment lists of whole transitions."""

    num_envs: int
    length: int
    rows: list[list[Row]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    trajectories: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [[] for _ in range(self.num_envs)]
        self.written = [0] * self.num_envs
        self.trajectories = [0] * self.num_envs

    def extend(self, obs, action, step: Step, active, autoreset: str) -> None:
        for e in range(self.num_envs):
            if active is not None and not bool(active[e]):
                continue
            terminated, truncated = bool(step.terminated[e]), bool(step.truncated[e])
            following = step.obs
            if (terminated or truncated) and autoreset == "same_step":
                following = step.info["final_obs"]
            here = {name: value[e].clone() for name, value in obs.items()}
            rows = self.rows[e]
            previous = rows[-1] if rows else None
            ended = previous is None or previous.terminated or previous.truncated
            if not ended and not same(previous.next_obs, here):
                previous.cut = ended = True
            if ended:
                self.trajectories[e] += 1
            rows.append(
                Row(
                    here,
                    {name: value[e].clone() for name, value in following.items()},
                    action[e].clone(),
                    float(step.reward[e]),
                    terminated,
                    truncated,
                    False,
                    e + (self.trajectories[e] - 1) * self.num_envs,
                    0 if ended else previous.step + 1,
                )
            )
            self.written[e] += 1
            del rows[: -self.length]

    def index(self) -> dict[int, tuple[int, int]]:
        """Identity → (environment, place in its list)."""
        out = {}
        for e, rows in enumerate(self.rows):
            first = self.written[e] - len(rows)
            for place in range(len(rows)):
                out[(first + place) * self.num_envs + e] = (e, place)
        return out

    def outcome(self, e: int, place: int, n: int, gamma: float) -> tuple[Row, np.float32, int, np.float32, bool]:
        """The transition whose next observation counts, the n-step reward, m, γᵐ and whether it is cut."""
        rows = self.rows[e]
        total, weight, m = 0.0, 1.0, 0
        while True:
            row = rows[place + m]
            total += weight * row.reward
            weight *= gamma
            m += 1
            over = row.terminated or row.truncated or row.cut
            if m == n or over or place + m == len(rows):
                head = not over and place + m == len(rows)
                return row, np.float32(total), m, np.float32(weight), row.cut or head


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(bits(a[name]) == bits(b[name]) for name in a)


def bits(value: Tensor) -> bytes:
    return value.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


class Stream:
    """Environments whose frames are all different, with ends, suspensions and callers who reset at will."""

    def __init__(
        self, seed: int, num_envs: int, spaces: dict[str, ArraySpec], stack: dict[str, StackSpec], autoreset: str
    ):
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.spaces, self.stack, self.autoreset = num_envs, spaces, stack, autoreset
        self.end_rate, self.jump_rate, self.idle_rate = 0.2, 0.05, 0.2
        self.obs = {name: torch.zeros(num_envs, *spec.shape, dtype=spec.dtype) for name, spec in spaces.items()}
        self.parked = np.zeros(num_envs, bool)
        for e in range(num_envs):
            self._first(self.obs, e)
        if self.rng.random() < 0.3:
            # join in the middle of an episode: stacks have a history that no reset explains
            for _ in range(3):
                for e in range(num_envs):
                    self._follow(self.obs, self.obs, e)

    def frame(self, name: str) -> Tensor:
        spec = self.spaces[name]
        shape = self.stack[name].frame_shape(spec.shape) if name in self.stack else spec.shape
        if spec.dtype == torch.bool:
            return torch.from_numpy(np.asarray(self.rng.random(shape) < 0.5))
        if spec.dtype.is_floating_point:
            return torch.from_numpy(np.asarray(self.rng.standard_normal(shape))).to(spec.dtype)
        return torch.from_numpy(np.asarray(self.rng.integers(0, 250, shape))).to(spec.dtype)

    def _first(self, obs: dict[str, Tensor], e: int) -> None:
        for name in self.spaces:
            frame = self.frame(name)
            if name in self.stack:
                spec = self.stack[name]
                older = frame if spec.reset == "repeat" else torch.zeros_like(frame)
                frames = torch.stack([older] * (spec.frames - 1) + [frame])
                obs[name][e] = spec.stack(frames[None])[0]
            else:
                obs[name][e] = frame

    def _follow(self, obs: dict[str, Tensor], before: dict[str, Tensor], e: int) -> None:
        for name in self.spaces:
            frame = self.frame(name)
            if name in self.stack:
                spec = self.stack[name]
                older = [spec.frame(before[name], k)[e].clone() for k in range(1, spec.frames)]
                obs[name][e] = spec.stack(torch.stack([*older, frame])[None])[0]
            else:
                obs[name][e] = frame

    def step(self, action_spec: ArraySpec):
        """One call's worth: obs, action, step, active."""
        n = self.num_envs
        for e in range(n):
            if self.parked[e] or self.rng.random() < self.jump_rate:
                self._first(self.obs, e)
                self.parked[e] = False
        obs = {name: value.clone() for name, value in self.obs.items()}
        active = torch.from_numpy(self.rng.random(n) >= self.idle_rate)
        if self.rng.random() < 0.3:
            active[:] = True
        following = {name: value.clone() for name, value in obs.items()}
        final = {name: torch.full_like(value, 111 if value.dtype != torch.bool else 1) for name, value in obs.items()}
        terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
        for e in range(n):
            if not active[e]:
                continue
            self._follow(following, obs, e)
            if self.rng.random() < self.end_rate:
                kind = self.rng.integers(3)
                terminated[e], truncated[e] = kind != 1, kind != 0
                if self.autoreset == "same_step":
                    for name in final:
                        final[name][e] = following[name][e]
                    self._first(following, e)
                else:
                    self.parked[e] = True
        done = terminated | truncated
        info = {}
        if done.any() and self.autoreset == "same_step":
            info = {"final_obs": final, "_final_obs": torch.from_numpy(done)}
        self.obs = {name: value.clone() for name, value in following.items()}
        shape = (n, *action_spec.shape)
        action = torch.from_numpy(self.rng.integers(0, 100, shape)).to(action_spec.dtype)
        reward = torch.from_numpy(self.rng.standard_normal(n)).to(torch.float32)
        step = Step(following, reward, torch.from_numpy(terminated), torch.from_numpy(truncated), info)
        return obs, action, step, None if bool(active.all()) else active


def check_batch(batch, store: NaiveStore, n_step: int, gamma: float) -> None:
    """Every field of every transition of a batch, bit for bit."""
    flat = batch.reshape(-1) if batch.dim() > 1 else batch
    where = store.index()
    for b in range(flat.shape[0]):
        e, place = where[int(flat["index"][b])]
        row = store.rows[e][place]
        last, reward, m, discount, cut = store.outcome(e, place, n_step, gamma)
        for name in row.obs:
            path = tuple(name.split("/")) if name else ()
            assert bits(flat[("observation", *path)][b]) == bits(row.obs[name]), (name, e, place)
            assert bits(flat[("next", "observation", *path)][b]) == bits(last.next_obs[name]), (name, e, place)
        assert bits(flat["action"][b]) == bits(row.action)
        assert flat["next", "reward"][b].numpy() == [reward]
        assert bool(flat["next", "terminated"][b]) == last.terminated
        assert bool(flat["next", "truncated"][b]) == last.truncated
        assert bool(flat["next", "done"][b]) == (last.terminated or last.truncated)
        assert bool(flat["next", "cut"][b]) == cut
        assert int(flat["collector", "traj_ids"][b]) == row.trajectory
        assert int(flat["step_count"][b]) == row.step
        if n_step > 1:
            assert int(flat["steps_to_next_obs"][b]) == m
            assert flat["gamma"][b].numpy() == [discount]
