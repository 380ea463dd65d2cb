"""Opens an export with LeRobot's own dataset class; runs in .venv-lerobot: ``lerobot_reader.py EPISODES EXPORT``.

The expected values come from the episode files, read with numpy alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch

# torchvision's operators are built for another torch; LeRobot imports torchvision but calls none of these
_library = torch.library.Library("torchvision", "DEF")
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lerobot.datasets.compute_stats import aggregate_stats, get_feature_stats  # noqa: E402  # after the settings that it reads at import
from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402  # after the settings that it reads at import


def can_decode() -> bool:
    """Whether torchcodec finds FFmpeg's libraries on this machine."""
    try:
        import torchcodec.decoders  # noqa: F401  # only whether it loads
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def main(source: Path, export: Path) -> None:
    lines = [json.loads(line) for line in (source / "journal.jsonl").read_text().splitlines()]
    lines.sort(key=lambda line: (line["seed"], line["episode_id"], line["attempt"]))
    dataset = LeRobotDataset("local/test", root=export)
    assert dataset.num_episodes == len(lines)
    assert len(dataset) == sum(line["length"] for line in lines)
    assert dataset.fps == 20
    decodes = can_decode()
    index = 0
    for number, line in enumerate(lines):
        with np.load(source / line["file"]) as episode:
            for step in range(line["length"]):
                item = dataset[index] if decodes else dataset.hf_dataset[index]
                assert int(item["episode_index"]) == number
                assert int(item["frame_index"]) == step
                expected = {
                    "observation.state": episode["obs/policy"][step],
                    "observation.inner.count": episode["obs/inner/count"][step],
                    "observation.inner.flags": episode["obs/inner/flags"][step],
                    "observation.grid": episode["obs/grid"][step],
                    "observation.environment_state": episode["states"][step],
                    "action": episode["actions"][step],
                    "next.reward": episode["rewards"][step],
                    "next.done": (episode["terminated"] | episode["truncated"])[step],
                    "next.success": line["success"] and step == line["length"] - 1,
                }
                for key, value in expected.items():
                    got = item[key].numpy()
                    # LeRobot gives every float as float32
                    np.testing.assert_array_equal(got, np.asarray(value, got.dtype), err_msg=f"{key} of row {index}")
                if decodes:
                    picture = item["observation.images.camera"].permute(1, 2, 0).numpy() * 255
                    own = np.abs(picture - episode["obs/camera"][step]).mean()
                    assert own < 6, f"row {index}: the frame is {own:.1f} levels off"
                    other = np.abs(picture - episode["obs/camera"][step + 1]).mean()
                    assert own < other, f"row {index}: the frame is the next one"
                    assert item["task"] == "count to the end"
                index += 1
    check_stats(dataset, source, lines)
    if decodes:
        near = LeRobotDataset("local/test", root=export, delta_timestamps={"action": [0.0, 0.05, 0.1]})
        assert near[0]["action"].shape == (3, 2)
    how = "torchcodec" if decodes else "no video decoded: FFmpeg's shared libraries are not installed"
    print(f"LeRobot reads {len(lines)} episodes, {index} rows ({how})")


def check_stats(dataset: LeRobotDataset, source: Path, lines: list[dict]) -> None:
    """Ours against those that LeRobot computes from the same numbers."""
    for key, name in (("observation.state", "obs/policy"), ("action", "actions")):
        parts = []
        for line in lines:
            with np.load(source / line["file"]) as episode:
                rows = episode[name][: line["length"]].astype(np.float64)
            parts.append({key: get_feature_stats(rows, axis=0, keepdims=False)})
        theirs, ours = aggregate_stats(parts)[key], dataset.meta.stats[key]
        assert set(theirs) == set(ours)
        for stat in ("min", "max", "mean", "std", "count"):
            # std from a mean of squares loses digits
            np.testing.assert_allclose(ours[stat], theirs[stat], rtol=1e-6, atol=1e-6)
        for stat in ("q01", "q10", "q50", "q90", "q99"):
            # theirs come from a histogram: ranks between rows of a short episode are settled differently
            spread = theirs["max"] - theirs["min"]
            assert np.all(np.abs(ours[stat] - theirs[stat]) <= 0.25 * spread + 1e-6), (key, stat)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
