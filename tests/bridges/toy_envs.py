"""Small environments with identifiable numbers; importable by worker processes."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class DictEnv(gymnasium.Env[Any, Any]):
    """A walk with its own noise: ends after 4 to 9 steps (drawn at reset), a success where the walk ends above 0."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "policy": spaces.Box(-np.inf, np.inf, (3,), np.float64),
                "camera": spaces.Box(0, 255, (2, 2, 3), np.uint8),
                "extra": spaces.Dict({"phase": spaces.Discrete(16), "pair": spaces.Tuple([spaces.MultiBinary(2)] * 2)}),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def _obs(self) -> dict[str, Any]:
        bits = np.array([self.count & 1, self.count >> 1 & 1], dtype=np.int8)
        return {
            "policy": np.array([self.place, self.count, self.length], dtype=np.float64),
            "camera": np.full((2, 2, 3), self.count, dtype=np.uint8),
            "extra": {"phase": self.count % 16, "pair": (bits, 1 - bits)},
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        self.place = float(self.np_random.normal())
        self.length = int(self.np_random.integers(4, 10))
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action.dtype == np.float32
        self.count += 1
        self.place += float(action.sum()) + float(self.np_random.normal())
        over = self.count >= self.length
        info = {"is_success": self.place > 0} if over else {}
        return self._obs(), self.place, over and self.place > 0, over and self.place <= 0, info


class PlainEnv(gymnasium.Env[Any, Any]):
    """One number that counts (100 · steps + the last action); the spaces and mishaps are the caller's."""

    def __init__(
        self,
        action_space: spaces.Space[Any] | None = None,
        *,
        length: int = 5,
        nan_at: int | None = None,
        raise_at: int | None = None,
        die_at: int | None = None,
        stuck_close: bool = False,
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(3) if action_space is None else action_space
        self.length, self.nan_at, self.raise_at, self.die_at = length, nan_at, raise_at, die_at
        self.stuck_close = stuck_close
        self.steps_ever = 0
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        self.first_seed = seed
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps_ever += 1
        self.count += 1
        self.actions.append(action)
        if self.count == self.raise_at:
            raise ValueError("the gripper is stuck")
        if self.count == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        value = np.nan if self.count == self.nan_at else 100.0 * self.count + float(np.sum(action))
        return np.array([value], dtype=np.float32), 1.0, self.count >= self.length, False, {}

    def close(self) -> None:
        if self.stuck_close:
            signal.pause()


class SpacesEnv(gymnasium.Env[Any, Any]):
    """Returns samples of any observation space."""

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = spaces.Discrete(2, start=5)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 0.0, False, False, {}


class ToldEnv(DictEnv):
    """:class:`DictEnv` that says in words how long its episode is: as text of the observation, or in ``info``."""

    def __init__(self, *, told_in: str = "obs", fickle: bool = False) -> None:
        super().__init__()
        self.told_in, self.fickle = told_in, fickle
        if told_in == "obs":
            self.observation_space = spaces.Dict({**self.observation_space, "goal": spaces.Text(40)})

    def _told(self, obs: dict[str, Any]) -> dict[str, Any]:
        text = f"walk {self.length + (self.count if self.fickle else 0)} steps"
        return obs | {"goal": text} if self.told_in == "obs" else obs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        told = {"instruction": f"walk {self.length} steps"} if self.told_in == "info" else {}
        return self._told(obs), info | told

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, *rest = super().step(action)
        return self._told(obs), *rest


class CountingPainter(PlainEnv):
    """Its picture shows how many it has drawn."""

    render_mode = "rgb_array"
    drawn = 0

    def render(self) -> Any:
        self.drawn += 1
        return np.full((2, 3, 3), self.drawn, dtype=np.uint8)
