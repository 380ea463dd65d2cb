"""Genuine LIBERO, or our plain reference, as an entry for another interpreter: ``bridge(python=…, entry="…:make")``.

Runs there beside ``export.py`` and ``plain.py``; headrace is not imported. What ``reset`` receives as its seed says
which initial state and which of the exported poses of fixtures to take, as the native task does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
# modules beside this file, found by the line above; pyright looks for modules of the package
import export  # pyright: ignore[reportImplicitRelativeImport, reportMissingImports]
import plain  # pyright: ignore[reportImplicitRelativeImport, reportMissingImports]

CAMERAS = ("agentview", "robot0_eye_in_hand")


class OneEpisode:
    """One environment: waits, horizon and gripper as the native task has them."""

    render_mode = None

    def __init__(self, name: str, file: str, assets: str, sim: str, settings: dict[str, Any]) -> None:
        """Read the exported ``file``; ``sim`` is ``robosuite`` or ``mujoco-3.3``."""
        self._own, self._arrays = plain.load_plain(file)
        self._settings, self._count, self._genuine = settings, 0, None
        shapes: dict[str, Any] = {"policy": {"type": "box", "shape": [8]}}
        shapes["critic"] = {"type": "box", "shape": [9 + self._own.model.nq]}
        cameras, pixels = list(settings["cameras"]), settings["pixels"]
        if sim == "robosuite":
            suite, _, index = name.partition("/")
            task = export.load_benchmark(Path(assets))[suite].get_task(int(index))
            seen = {"use_camera_obs": True, "has_offscreen_renderer": True, "camera_names": cameras}
            seen |= {"camera_heights": pixels, "camera_widths": pixels}
            # a reset need not compile the model: everything that it would draw is set below
            self._genuine = export.make_env(export.task_files(task)[0], hard_reset=False, **(seen if cameras else {}))
        elif cameras:
            raise ValueError(f"sim {sim!r} draws no pictures; pass cameras=()")
        self._cameras = cameras
        shapes |= {camera: {"type": "box", "shape": [pixels, pixels, 3], "dtype": "uint8"} for camera in cameras}
        self.observation_space = {"type": "dict", "spaces": shapes}
        bounds = {"low": -np.ones(7, np.float32), "high": np.ones(7, np.float32)}
        self.action_space = {"type": "box", "shape": [7], "dtype": "float32", **bounds}

    def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode; ``seed`` is its id times the number of draws of fixtures, plus the draw."""
        episode, draw = divmod(seed, self._arrays["fixtures"].shape[1] if self._own.record["fixtures"] else 1)
        state = self._arrays["states"][episode % len(self._arrays["states"])]
        poses = dict(zip(self._own.record["fixtures"], self._arrays["fixtures"][:, draw], strict=True))
        if self._genuine is None:
            self._own.reset(state, poses)
        else:
            self._genuine.reset()
            gripper = self._genuine.robots[0].gripper
            gripper.current_action = np.zeros(gripper.dof)  # a reset that compiles makes a new one
            model = self._genuine.sim.model._model
            for name, pose in poses.items():
                body = model.body(name).id
                model.body_pos[body], model.body_quat[body] = pose[:3], pose[3:]
            self._obs = self._genuine.set_init_state(state)
        for _ in range(self._settings["waits"]):
            self._advance(np.array(plain.WAIT))
        self._count = 0
        return self._seen(), {"instruction": self._own.record["instruction"]}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Take one control step."""
        moved = np.asarray(action, np.float64).copy()
        if self._settings["gripper"] == "unit":
            moved[6] = 1.0 - 2.0 * moved[6]
        done = self._advance(moved)
        self._count += 1
        return self._seen(), float(done), done, self._count >= self._settings["horizon"], {"is_success": done}

    def close(self) -> None:
        """Release LIBERO's renderer."""
        if self._genuine is not None:
            self._genuine.close()

    def _advance(self, action: Any) -> bool:
        if self._genuine is None:
            return self._own.step(action)
        self._obs, _, done, _ = self._genuine.step(action)
        return bool(done)

    def _seen(self) -> dict[str, Any]:
        if self._genuine is None:
            place, turn, fingers = (self._own.seen[name] for name in ("eef_pos", "eef_quat", "gripper_qpos"))
            joints = self._own.seen["qpos"]
        else:
            place, turn, fingers = (self._obs[f"robot0_{name}"] for name in ("eef_pos", "eef_quat", "gripper_qpos"))
            joints = self._genuine.sim.data.qpos  # those after the step: LIBERO does not observe them
        state = np.concatenate([place, plain.axis_angle(np.asarray(turn)[None])[0], fingers]).astype(np.float32)
        pictures = {name: np.ascontiguousarray(self._obs[f"{name}_image"][::-1]) for name in self._cameras}
        whole = np.concatenate([place, turn, fingers, joints]).astype(np.float32)
        return {"policy": state, "critic": whole, **pictures}


def make(name: str, file: str, assets: str, sim: str, settings: dict[str, Any]) -> OneEpisode:
    """Make one environment."""
    return OneEpisode(name, file, assets, sim, settings)
