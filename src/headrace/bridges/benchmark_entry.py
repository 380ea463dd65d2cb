"""MetaWorld and PushT as entries for another interpreter: ``bridge(python=…, entry="…/benchmark_entry.py:make")``.

Runs there alone; headrace is not imported. Observations have LeRobot's keys; pictures are drawn when they are read.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

STATE, SCENE, IMAGE = "observation.state", "observation.environment_state", "observation.image"


def make(name: str, pixels: int) -> Any:
    """Make ``pusht``, or a task of MetaWorld's MT50; ``pixels`` is the side of its picture, 0 for none."""
    return PushT(pixels) if name == "pusht" else MetaWorld(name, pixels)


class MetaWorld:
    """One task of MetaWorld 3.1.1, with the camera of LeRobot's evaluation; success ends the episode."""

    render_mode = None

    def __init__(self, name: str, pixels: int) -> None:
        """Make the environment; what a reset draws comes from the episode's seed."""
        os.environ.setdefault("MUJOCO_GL", "egl")
        mt1 = importlib.import_module("metaworld").MT1(name, seed=42)
        size = {"width": pixels, "height": pixels} if pixels else {}
        self._env = mt1.train_classes[name](render_mode="rgb_array", camera_name="corner2", **size)
        self._env.set_task(mt1.train_tasks[0])
        self._env.model.cam_pos[2] = (0.75, 0.075, 0.7)
        self._env._freeze_rand_vec, self._env.seeded_rand_vec = False, True
        self._text = name.rpartition("-")[0].replace("-", " ")
        self.drawn_on_demand, self.observation_space = _groups(4, 39, pixels)
        bounds = {"low": -np.ones(4, np.float32), "high": np.ones(4, np.float32)}
        self.action_space = {"type": "box", "shape": [4], "dtype": "float32", **bounds}

    def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin the episode of a seed."""
        self._env.seed(seed)
        return self._read(self._env.reset()[0]), {"instruction": self._text}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Take one control step; the horizon is MetaWorld's own 500."""
        obs, reward, _, _, info = self._env.step(np.asarray(action, np.float64).clip(-1.0, 1.0))
        done, late = bool(info["success"]), self._env.curr_path_length >= self._env.max_path_length
        return self._read(obs), float(reward), done, late, {"is_success": done}

    def draw(self) -> dict[str, Any]:
        """Draw the picture; this camera stands on its head."""
        return {IMAGE: np.ascontiguousarray(np.flip(self._env.render(), (0, 1)))}

    def close(self) -> None:
        """Release the renderer."""
        self._env.close()

    def _read(self, obs: Any) -> dict[str, Any]:
        return {STATE: obs[:4].astype(np.float32), SCENE: obs.astype(np.float32)}


class PushT:
    """gym-pusht 0.1.8, 300 steps."""

    render_mode = None

    def __init__(self, pixels: int) -> None:
        """Make the environment."""
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        importlib.import_module("gym_pusht")
        size = {"observation_width": pixels, "observation_height": pixels} if pixels else {}
        made = importlib.import_module("gymnasium").make("gym_pusht/PushT-v0", obs_type="state", **size)
        self._env, self._count = made.unwrapped, 0
        self.drawn_on_demand, self.observation_space = _groups(2, 5, pixels)
        bounds = {"low": np.zeros(2, np.float32), "high": np.full(2, 512, np.float32)}
        self.action_space = {"type": "box", "shape": [2], "dtype": "float32", **bounds}

    def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin the episode of a seed."""
        self._count = 0
        return self._read(self._env.reset(seed=seed)[0]), {"instruction": "push the T onto its target"}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Take one control step."""
        obs, reward, done, _, info = self._env.step(np.asarray(action, np.float64))
        self._count += 1
        return self._read(obs), float(reward), bool(done), self._count >= 300, {"is_success": bool(info["is_success"])}

    def draw(self) -> dict[str, Any]:
        """Draw the picture that ``pixels_agent_pos`` has."""
        return {IMAGE: self._env._render(visualize=False)}

    def close(self) -> None:
        """Release pygame's surfaces."""
        self._env.close()

    def _read(self, obs: Any) -> dict[str, Any]:
        return {STATE: obs[:2].astype(np.float32), SCENE: obs.astype(np.float32)}


def _groups(state: int, scene: int, pixels: int) -> tuple[tuple[str, ...], dict[str, Any]]:
    shapes: dict[str, Any] = {STATE: {"type": "box", "shape": [state]}, SCENE: {"type": "box", "shape": [scene]}}
    if pixels:
        shapes[IMAGE] = {"type": "box", "shape": [pixels, pixels, 3], "dtype": "uint8"}
    return ((IMAGE,) if pixels else ()), {"type": "dict", "spaces": shapes}
