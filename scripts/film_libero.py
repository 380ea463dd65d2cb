"""Makes docs/images/libero.mp4 and its still libero.jpg: scripted experts in four native tasks of LIBERO.

Needs exported tasks (docs/libero.md) and ffmpeg.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

import headrace
from headrace.imitation.experts import expert_for

TASKS = ("libero_spatial/0", "libero_object/0", "libero_goal/7", "libero_90/0")
TARGET = Path("docs/images/libero.mp4")
PIXELS, FPS, HELD = 256, 20, 15


def film(task: str) -> list[np.ndarray]:
    """Return what ``agentview`` shows of an episode, and its last picture for a while."""
    env = headrace.make(task, 1, overrides={"cameras": ("agentview",), "pixels": PIXELS}, autoreset="disabled")
    obs, _ = env.reset(seed=0)
    expert, frames, success = expert_for(task), [obs["agentview"][0].numpy().copy()], False
    while bool(env.active.any()):
        step = env.step(expert(obs))
        obs = step.obs
        frames.append(obs["agentview"][0].numpy().copy())
        success = success or bool(step.terminated.any())
    env.close()
    assert success, task
    return frames


def main() -> None:
    """Play an episode of each task, show them together, take one frame as the still."""
    films = [film(task) for task in TASKS]
    length = max(map(len, films)) + HELD
    tiles = np.stack([np.stack(each + [each[-1]] * (length - len(each))) for each in films], axis=1)
    top, bottom = (np.concatenate((tiles[:, i], tiles[:, i + 1]), axis=2) for i in (0, 2))
    frames = np.concatenate((top, bottom), axis=1)
    size = f"{frames.shape[2]}x{frames.shape[1]}"
    encode = ["ffmpeg", "-y", "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(FPS)]
    encode += [
        "-i",
        "-",
        "-c:v",
        "libx264",
        "-crf",
        "28",
        "-pix_fmt",
        "yuv420p",
        "-movflags",
        "+faststart",
        str(TARGET),
    ]
    subprocess.run(encode, input=frames.tobytes(), check=True)
    still = ["ffmpeg", "-y", "-loglevel", "error", "-ss", "2.5", "-i", str(TARGET), "-frames:v", "1", "-q:v", "5"]
    subprocess.run([*still, str(TARGET.with_suffix(".jpg"))], check=True)


if __name__ == "__main__":
    main()
