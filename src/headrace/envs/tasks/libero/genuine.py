"""Genuine LIBERO, or our plain reference, as an entry for another interpreter: ``bridge(python=…, entry="…:make")``.

Runs there beside ``export.py`` and ``plain.py``; headrace is not imported. What ``reset`` receives as its seed says
which initial state and which of the exported poses of fixtures to take, as the native task does.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
# modules beside this file, found by the line above; pyright looks for modules of the package
import export  # pyright: ignore[reportImplicitRelativeImport, reportMissingImports]
import plain  # pyright: ignore[reportImplicitRelativeImport, reportMissingImports]

_DRAWN = (
    *("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir"),
    *("xpos", "xquat", "xmat", "xipos", "ximat"),
)
"""Fields of MjData that a picture depends on."""


class OneEpisode:
    """One environment: waits, horizon and gripper as the native task has them."""

    render_mode = None

    def __init__(self, name: str, file: str, assets: str, sim: str, settings: dict[str, Any]) -> None:
        """Read the exported ``file``; ``sim`` is ``robosuite`` or ``mujoco-3.3``."""
        self._own, self._arrays = plain.load_plain(file, plain.FORWARDS)
        self._settings, self._count = settings, 0
        self._genuine: Any = None
        shapes: dict[str, Any] = {"policy": {"type": "box", "shape": [8]}}
        shapes["critic"] = {"type": "box", "shape": [9 + self._own.model.nq]}
        cameras, pixels = list(settings["cameras"]), settings["pixels"]
        if sim == "robosuite":
            suite, _, index = name.partition("/")
            task = export.load_benchmark(Path(assets))[suite].get_task(int(index))
            if cameras:
                os.environ.setdefault("MUJOCO_GL", "egl")  # robosuite asks for a display otherwise
            seen = {"use_camera_obs": True, "has_offscreen_renderer": True, "camera_names": cameras}
            seen |= {"camera_heights": pixels, "camera_widths": pixels}
            # a reset need not compile the model: everything that it would draw is set below
            self._genuine = export.make_env(export.task_files(task)[0], hard_reset=False, **(seen if cameras else {}))
        elif cameras:
            raise ValueError(f"sim {sim!r} draws no pictures; pass cameras=()")
        self.drawn_on_demand = tuple(cameras)
        self._sensors: dict[str, Any] = {}
        note: Any = functools.partial(self._note)
        note.__modality__ = "image"  # robosuite reads it of its sensors
        for camera in cameras:
            observable = self._genuine.env._observables[f"{camera}_image"]
            self._sensors[camera], observable._sensor = observable._sensor, note
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
            self._reset_genuine()
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

    def _reset_genuine(self) -> None:
        """Reset without LIBERO's own loop, which tries again after every error, forever."""
        errors: Any = importlib.import_module("robosuite.utils.errors")
        while True:
            try:
                self._genuine.env.reset()
            except errors.RandomizationError:
                continue
            return

    def draw(self) -> dict[str, Any]:
        """Draw the cameras as LIBERO would have when it observed last: from the poses of that moment."""
        now = self._places()
        self._place(self._noted)
        try:
            return {name: np.ascontiguousarray(sensor({})[::-1]) for name, sensor in self._sensors.items()}
        finally:
            self._place(now)

    def _note(self, cache: Any) -> Any:
        """Stand in for a camera: keep what its picture depends on."""
        del cache
        self._noted = self._places()
        return np.zeros((1, 1, 3))

    def _places(self) -> list[Any]:
        data, model = self._genuine.sim.data._data, self._genuine.sim.model._model
        return [model.site_rgba.copy(), *(getattr(data, name).copy() for name in _DRAWN)]

    def _place(self, places: list[Any]) -> None:
        data, model = self._genuine.sim.data._data, self._genuine.sim.model._model
        for target, values in zip((model.site_rgba, *(getattr(data, name) for name in _DRAWN)), places, strict=True):
            target[:] = values

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
        whole = np.concatenate([place, turn, fingers, joints]).astype(np.float32)
        return {"policy": state, "critic": whole}


def make(name: str, file: str, assets: str, sim: str, settings: dict[str, Any]) -> OneEpisode:
    """Make one environment."""
    return OneEpisode(name, file, assets, sim, settings)
