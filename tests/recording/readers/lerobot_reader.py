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

from episodes import Source, newest  # noqa: E402  # after the settings that LeRobot reads at import
from lerobot.datasets.compute_stats import aggregate_stats, get_feature_stats  # noqa: E402
from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402


def can_decode() -> bool:
    """Whether torchcodec finds FFmpeg's libraries on this machine."""
    try:
        import torchcodec.decoders  # noqa: F401  # only whether it loads
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def main(source: Source, export: Path) -> None:
    about = json.loads((export / "meta" / "headrace.json").read_text())
    fields = {key: entry["field"] for key, entry in about["features"].items() if isinstance(entry, dict)}
    images = {key: field for key, field in fields.items() if key.startswith("observation.images.")}
    dataset = LeRobotDataset("local/test", root=export)
    assert dataset.num_episodes == len(source.lines)
    assert len(dataset) == sum(line["length"] for line in source.lines)
    assert set(dataset.meta.camera_keys) == set(images)
    decodes = can_decode()
    if images and not decodes:
        sys.exit("torchcodec finds no FFmpeg: run make system-packages")
    index = 0
    for number, (line, episode) in enumerate(source.episodes()):
        text = line["instruction"] or source.info["instruction"] or source.info["recipe"]["source"]
        for step in range(line["length"]):
            item = dataset[index] if decodes else dataset.hf_dataset[index]
            assert int(item["episode_index"]) == number
            assert int(item["frame_index"]) == step
            assert abs(float(item["timestamp"]) - step / dataset.fps) < 1e-4
            expected = {key: episode[field][step] for key, field in fields.items() if key not in images}
            expected["next.done"] = (episode["terminated"] | episode["truncated"])[step]
            if line["success"] is not None:
                expected["next.success"] = line["success"] and step == line["length"] - 1
            for key, value in expected.items():
                got = item[key].numpy()
                # LeRobot gives every float as float32, and a vector of one number as a number
                np.testing.assert_array_equal(
                    got.reshape(-1), np.asarray(value, got.dtype).reshape(-1), err_msg=f"{key} of row {index}"
                )
            if decodes:
                assert item["task"] == text
                for key, field in images.items():
                    check_image(item[key], newest(source, field, episode[field]), step, f"{key} of row {index}")
            index += 1
    check_stats(dataset, source)
    if decodes:
        near = LeRobotDataset("local/test", root=export, delta_timestamps={"action": [0.0, 1 / dataset.fps]})
        assert near[0]["action"].shape[0] == 2
    print(f"LeRobot reads {len(source.lines)} episodes, {index} rows, {len(images)} cameras")


def check_image(got: torch.Tensor, frames: np.ndarray, step: int, where: str) -> None:
    image = got.permute(1, 2, 0).numpy() * 255
    own = np.abs(image - frames[step]).mean()
    # a lossy codec: some levels off, and nearer to its own frame than to one that differs by more than the codec loses
    assert own < 6, f"{where}: the frame is {own:.1f} levels off"
    moved = np.abs(frames[step + 1].astype(int) - frames[step]).mean()
    if moved > 2 * own:
        assert own < np.abs(image - frames[step + 1]).mean(), f"{where}: the frame is the next one"


def check_stats(dataset: LeRobotDataset, source: Source) -> None:
    """Ours against those that LeRobot computes from the same numbers."""
    parts, taken = [], []
    for line, episode in source.episodes():
        rows = episode["actions"][: line["length"]].astype(np.float64)
        taken.append(np.sort(rows.reshape(len(rows), -1), axis=0))
        parts.append({"action": get_feature_stats(rows, axis=0, keepdims=False)})
    theirs, ours = aggregate_stats(parts)["action"], dataset.meta.stats["action"]
    assert set(theirs) == set(ours)
    for stat in ("min", "max", "mean", "std", "count"):
        # std from a mean of squares loses digits
        np.testing.assert_allclose(ours[stat], theirs[stat], rtol=1e-6, atol=1e-6)
    # theirs come from a histogram: ranks are settled differently, within the rows next to the quantile's
    spread, counts = theirs["max"] - theirs["min"], [len(rows) for rows in taken]
    for stat, share in (("q01", 0.01), ("q10", 0.10), ("q50", 0.50), ("q90", 0.90), ("q99", 0.99)):
        ranks = [share * (count - 1) for count in counts]
        low = [rows[max(int(rank) - 1, 0)] for rows, rank in zip(taken, ranks, strict=True)]
        high = [rows[min(int(rank) + 2, len(rows) - 1)] for rows, rank in zip(taken, ranks, strict=True)]
        for stats in (ours, theirs):
            assert np.all(stats[stat] >= np.average(low, axis=0, weights=counts) - 0.01 * spread - 1e-6), stat
            assert np.all(stats[stat] <= np.average(high, axis=0, weights=counts) + 0.01 * spread + 1e-6), stat


if __name__ == "__main__":
    main(Source(Path(sys.argv[1])), Path(sys.argv[2]))
