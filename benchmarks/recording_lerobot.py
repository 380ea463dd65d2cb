"""LeRobot's own writer, timed in .venv-lerobot: ``recording_lerobot.py EPISODE.npz FRAMES``; see recording.py."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch

# torchvision's operators are built for another torch; LeRobot imports torchvision but calls none of these
_library = torch.library.Library("torchvision", "DEF")
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402  # after the settings that it reads at import


def main(file: str, frames: int) -> None:
    with np.load(file) as episode:
        state, image = episode["obs/policy"], episode["obs/image"]
        action, reward = episode["actions"], episode["rewards"]
    frames = min(frames, len(action))
    features = {
        "observation.state": {"dtype": "float32", "shape": state.shape[1:], "names": None},
        "observation.images.image": {
            "dtype": "video",
            "shape": image.shape[1:],
            "names": ["height", "width", "channels"],
        },
        "action": {"dtype": "float32", "shape": action.shape[1:], "names": None},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "dataset"
        dataset = LeRobotDataset.create("local/bench", 20, features, root=root, use_videos=True)
        seconds = []
        for _ in range(3):  # the first episode warms up
            begin = time.perf_counter()
            for step in range(frames):
                dataset.add_frame(
                    {
                        "observation.state": state[step],
                        "observation.images.image": image[step],
                        "action": action[step],
                        "next.reward": reward[step : step + 1],
                        "task": "push",
                    }
                )
            dataset.save_episode()
            seconds.append(time.perf_counter() - begin)
        dataset.finalize()
    print(json.dumps({"seconds_per_frame": min(seconds[1:]) / frames}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
