"""What was recorded, read with numpy and the standard library alone: readers compare exports with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


class Source:
    """A dataset directory, in the order of exports."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.info: dict[str, Any] = json.loads((path / "dataset.json").read_text())
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in (path / "journal.jsonl").open()]
        self.lines.sort(key=lambda line: (line["seed"], line["episode_id"], line["attempt"]))

    def episodes(self) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
        """Each journal line with the episode's arrays."""
        for line in self.lines:
            with np.load(self.path / line["file"]) as arrays:
                yield line, {name: arrays[name] for name in arrays.files if name != "episode.json"}


def newest(source: Source, field: str, rows: np.ndarray) -> np.ndarray:
    """The newest frame of each row, (T, H, W, 3)."""
    stack = source.info["stacks"].get(field)
    if stack is None:
        return rows
    assert stack["layout"] == "concat"
    size = rows.shape[-1] // stack["frames"]
    return rows[..., -size:]
