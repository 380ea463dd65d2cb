"""Environments with several observation groups: a class task with a camera, and a Gymnasium one over a bridge."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import headrace
from headrace.envs.image_spec import ImageSpec
from headrace.envs.tasks.cartpole import CARTPOLE_XML, Cartpole, CartpoleCfg
from headrace.sim.camera.camera import CameraSpec
from headrace.sim.mujoco_api import load_model

PIXELS = 24


class SeenCartpole(Cartpole):
    """Proprioception (``policy``), a camera (``camera``), and more for the critic (``critic``) if asked for."""

    def __init__(self, cfg: CartpoleCfg, *, critic: bool = False) -> None:
        camera = ImageSpec(camera=CameraSpec(name="side", width=PIXELS, height=PIXELS), kind="gray")
        sizes = {"policy": 4} | ({"critic": 5} if critic else {})
        headrace.Task.__init__(self, cfg, load_model(CARTPOLE_XML.read_text()), sizes, {"camera": camera})
        self._critic = critic

    def observe(self, rows: headrace.Rows) -> dict[str, Any]:
        seen = super().observe(rows)
        if self._critic:
            seen["critic"] = seen["policy"][:, [0, 1, 2, 3, 0]] * 2.0
        return seen


def seen_cartpole(num_envs: int = 4, *, critic: bool = False) -> headrace.BatchEnv:
    return headrace.make(SeenCartpole(CartpoleCfg(episode_length=12), critic=critic), num_envs, seed=5, threads=1)


class Reach(gymnasium.Env[dict[str, Any], Any]):
    """Bring a point to a goal: where it is as a vector, the goal as a bright spot in an image, a clock in bytes."""

    observation_space = spaces.Dict(
        {
            "position": spaces.Box(-1.0, 1.0, (2,), np.float64),
            "view": spaces.Box(0, 255, (PIXELS, PIXELS, 1), np.uint8),
            "clock": spaces.MultiBinary(4),
        }
    )
    action_space = spaces.Box(-0.5, 0.5, (2,), np.float32)

    def __init__(self) -> None:
        self._at, self._goal, self._steps = np.zeros(2), np.zeros(2), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self._at, self._goal, self._steps = self.np_random.uniform(-1, 1, 2), self.np_random.uniform(-1, 1, 2), 0
        return self._seen(), {}

    def step(self, action: Any):
        self._at = np.clip(self._at + np.asarray(action, dtype=np.float64), -1.0, 1.0)
        self._steps += 1
        far = float(np.abs(self._at - self._goal).sum())
        return self._seen(), -far, far < 0.1, self._steps >= 10, {}

    def _seen(self) -> dict[str, Any]:
        view = np.zeros((PIXELS, PIXELS, 1), np.uint8)
        row, column = ((self._goal + 1) / 2 * (PIXELS - 4)).astype(int)
        view[row : row + 4, column : column + 4] = 255
        clock = np.array([self._steps >> bit & 1 for bit in range(4)], np.int8)
        return {"position": self._at.copy(), "view": view, "clock": clock}


def reach(num_envs: int = 4):
    return headrace.bridge([Reach] * num_envs, seed=3)
