"""Makes docs/images/aloha.mp4 and its still aloha.png: the policy that ships, in four environments, with shadows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
from torch import Tensor

import headrace
from headrace import evaluate, load_policy
from headrace.evaluation import PlayCfg
from headrace.recording import VideoObserver
from headrace.sim import CameraSpec, NativeCamera
from headrace.sim.camera.camera import PoseReader

TASK = "aloha-transfer-cube-state"
TARGET = Path("docs/images/aloha.mp4")


def main() -> None:
    """Play four episodes, then take one frame of the film as the still."""
    env = headrace.make(TASK, num_envs=4, seed=3, autoreset="disabled")
    model = env.sim.model
    camera = NativeCamera(model, CameraSpec(name="angle", width=320, height=240, shadows=True, specular=True))
    reader = PoseReader(model)

    def draw(ids: Tensor) -> list[np.ndarray]:
        rows = env.rows(ids)
        poses = reader.read(np.ascontiguousarray(rows.get("qpos").numpy()))
        return list(np.asarray(camera.render(poses).rgb).copy())

    TARGET.unlink(missing_ok=True)
    with VideoObserver(TARGET, num_envs=4, fps=16, render=draw) as film:
        env.attach(film)
        evaluate(env, load_policy(TASK), episodes=4, play=PlayCfg(execute=16))
    still = ["ffmpeg", "-y", "-loglevel", "error", "-ss", "4.4", "-i", str(TARGET), "-frames:v", "1"]
    subprocess.run([*still, str(TARGET.with_suffix(".png"))], check=True)


if __name__ == "__main__":
    main()
