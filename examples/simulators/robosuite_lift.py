"""robosuite's Lift for headrace's other-interpreter bridge: an entry for a virtual environment that headrace is not in.

robosuite 1.5 needs numpy 1 and MuJoCo 3.3, headrace's own tasks need MuJoCo 4. So robosuite stays in an environment of
its own (``pip install robosuite==1.5.2 mujoco==3.3.7``), and headrace steps it from outside::

    env = headrace.bridge(python="…/bin/python", entry="examples/simulators/robosuite_lift.py:make", num_envs=4)

This file runs there: it imports neither headrace nor Gymnasium.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import robosuite  # pyright: ignore[reportMissingImports]  # not in headrace's own environment
from robosuite.controllers import load_composite_controller_config  # pyright: ignore[reportMissingImports]

GROUPS = ("robot0_proprio-state", "object-state")


class Lift:
    """One arm lifts a cube; an episode is a function of the seed that ``reset`` gets."""

    render_mode = "rgb_array"

    def __init__(self, robot: str = "Panda", horizon: int = 200, image_size: int = 0) -> None:
        """With an ``image_size`` the view of the front camera is a group, too: that takes MUJOCO_GL."""
        self._images = image_size > 0
        self._env = robosuite.make(
            "Lift",
            robots=robot,
            controller_configs=load_composite_controller_config(controller="BASIC", robot=robot),
            has_renderer=False,
            has_offscreen_renderer=self._images,
            use_camera_obs=self._images,
            camera_names="frontview",
            camera_heights=image_size or 64,
            camera_widths=image_size or 64,
            use_object_obs=True,
            reward_shaping=True,
            horizon=horizon,
            # else a reset compiles the model anew, for seconds
            hard_reset=False,
            # the size of the cube is drawn when the model is loaded: the same one in every environment
            seed=0,
            ignore_done=True,
        )
        self._horizon = horizon
        low, high = self._env.action_spec
        self.action_space = {"type": "box", "shape": list(low.shape), "dtype": "float32", "low": low, "high": high}
        first = self._env.observation_spec()
        spaces: dict[str, Any] = {name: {"type": "box", "shape": list(first[name].shape)} for name in GROUPS}
        if self._images:
            spaces["frontview"] = {"type": "box", "shape": [image_size, image_size, 3], "dtype": "uint8"}
        self.observation_space = {"type": "dict", "spaces": spaces}

    def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Every generator that robosuite draws from is made from the seed: its own ``seed=`` is of ``make`` only."""
        rng = np.random.default_rng(seed)
        env = self._env
        env.rng = rng
        env.placement_initializer.rng = rng
        for robot in env.robots:
            robot.rng = rng
        self._count = 0
        return self._seen(env.reset()), {"instruction": "lift the cube"}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """One control step; lifting the cube ends the episode."""
        obs, reward, _, _ = self._env.step(action)
        self._count += 1
        lifted = bool(self._env._check_success())
        return self._seen(obs), float(reward), lifted, self._count >= self._horizon, {"is_success": lifted}

    def render(self) -> Any:
        """The view of the front camera, (H, W, 3)."""
        return self._env.sim.render(camera_name="frontview", width=256, height=256)[::-1]

    def close(self) -> None:
        """Release the simulator."""
        self._env.close()

    def _seen(self, obs: dict[str, Any]) -> dict[str, Any]:
        seen = {name: np.asarray(obs[name], dtype=np.float32) for name in GROUPS}
        if self._images:
            seen["frontview"] = obs["frontview_image"][::-1]
        return seen


make = Lift
