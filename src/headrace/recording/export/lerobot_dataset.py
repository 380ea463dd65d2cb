"""Reading a dataset in LeRobot's layout (codebase version 3): numbers from parquet, images from mp4.

Episodes look like those of :class:`headrace.recording.EpisodeDataset`, with the rows that the format has: one per step,
so that the last observation of an episode is missing.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError, require_extra
from headrace.files import check_expansion, disk, open_untrusted, parsing, read_json
from headrace.recording._episode_file import EpisodeMeta
from headrace.recording._video import decode_frames
from headrace.recording.export._lerobot import ABOUT, VIDEO_PATH
from headrace.recording.fields import Array, Field

_INFO = Path("meta") / "info.json"
_FIELDS = {"action": "actions", "next.reward": "rewards", "observation.state": "obs/policy"}
_IMAGES = "observation.images."
_OBSERVATION = "observation."

Line = dict[str, Any]
"""What ``meta/episodes`` says of an episode."""


def is_lerobot(path: Path) -> bool:
    """Return whether a directory is a dataset of LeRobot's."""
    return (path / _INFO).is_file()


def read_parquet(path: Path, folder: str, columns: Sequence[str] | None = None) -> list[Any]:
    """Return the tables under a directory of a dataset, in order."""
    parquet = require_extra("pyarrow.parquet", extra="record", purpose="LeRobot's parquet files")
    found: list[Any] = []
    for file in sorted((path / folder).rglob("*.parquet")):
        with parsing(file), open_untrusted(file) as raw, parquet.ParquetFile(raw) as opened:
            groups = [opened.metadata.row_group(number) for number in range(opened.num_row_groups)]
            values = sum(group.column(number).num_values for group in groups for number in range(group.num_columns))
            check_expansion(file, 8 * values, file.stat().st_size)
            found.append(opened.read(columns))
    return found


def read_episodes(path: Path) -> list[Line]:
    """Return what ``meta/episodes`` says of each episode, in order."""
    lines = [line for table in read_parquet(path, "meta/episodes") for line in table.to_pylist()]
    return sorted(lines, key=lambda line: int(line["episode_index"]))


def video_files(path: Path, info: Mapping[str, Any], key: str, lines: Sequence[Line]) -> dict[Path, list[Line]]:
    """Return the files of a video feature, each with its episodes."""
    found: dict[Path, list[Line]] = {}
    if info["video_path"] != VIDEO_PATH or "/" in key:
        raise DataError(f"{path}: {key}: expected videos at {VIDEO_PATH}, got {info['video_path']!r}")
    for line in lines:
        place = {name: int(line[f"videos/{key}/{name}"]) for name in ("chunk_index", "file_index")}
        found.setdefault(path / VIDEO_PATH.format(video_key=key, **place), []).append(line)
    return found


class LeRobotEpisode:
    """One episode; the caller owns the arrays that it reads."""

    def __init__(self, dataset: LeRobotDataset, meta: EpisodeMeta, first: int) -> None:
        self.meta = meta
        self._dataset = dataset
        self._first = first

    @property
    def names(self) -> list[str]:
        """Paths of its arrays, such as ``obs/policy``."""
        return list(self._dataset.fields)

    def field(self, name: str) -> Field:
        """Dtype and row shape of an array."""
        try:
            return self._dataset.fields[name]
        except KeyError:
            known = ", ".join(self._dataset.fields)
            raise DataError(f"{self._dataset.path}: no array {name!r}; it has {known}") from None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Return rows ``start:stop`` of one array."""
        self.field(name)
        first, last, _ = slice(start, stop).indices(self.meta.length)
        return np.array(self._dataset.rows(name)[self._first + first : self._first + last])


class LeRobotDataset:
    """The episodes of a dataset in LeRobot's layout, version 3.

    A feature of an export that headrace wrote has the name of the field it comes from. Of any other dataset,
    ``observation.state`` is ``obs/policy``, ``observation.images.top`` is ``obs/top``, ``action`` is ``actions``.
    Numbers are read at once; a video is decoded once, into an unnamed temporary file, when its images are first read.

    Args:
        path: the directory with ``meta/info.json``.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with parsing(self.path):
            self._read_about()

    def _read_about(self) -> None:
        info = read_json(self.path / _INFO)
        version = str(info.get("codebase_version"))
        if not version.startswith("v3"):
            raise DataError(
                f"{self.path}: expected LeRobot's codebase version v3, got {version}; convert it with lerobot"
            )
        self._info = info
        about = read_json(self.path / ABOUT) if (self.path / ABOUT).is_file() else {}
        self.recipe = cast("Mapping[str, Any]", about.get("recipe", {}))
        """Of the environment, where an export of ours says it; else empty."""
        self._key_of: dict[str, str] = {}
        self.fields: dict[str, Field] = {}
        named = cast("Mapping[str, Any]", about.get("features", {}))
        for key, feature in cast("Mapping[str, Any]", info["features"]).items():
            said = named.get(key)
            name = said["field"] if isinstance(said, dict) else _field_name(key)
            if name is not None:
                self._key_of[name] = key
                self.fields[name] = _field(name, key, feature, self.path)
        self._lines = read_episodes(self.path)
        expected = int(info["total_episodes"])
        if not self._lines or len(self._lines) != expected:
            raise DataError(f"{self.path}: expected {expected} episodes in meta/episodes, got {len(self._lines)}")
        self._columns = self._read_columns()
        self._frames: dict[str, Array] = {}
        self._judged = self._columns.get("next.success")
        self._ids = [entry[:2] for entry in about.get("episodes", [])]
        if "actions" not in self.fields:
            raise DataError(f"{self.path}: no feature 'action'; there is nothing to learn from")

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[LeRobotEpisode]:
        with parsing(self.path):
            for number, line in enumerate(self._lines):
                first, length = int(line["dataset_from_index"]), int(line["length"])
                if not 0 <= first <= first + length <= self._info["total_frames"]:
                    raise DataError(f"{self.path}: episode {number}: rows {first} to {first + length} are not in data")
                success = None if self._judged is None else bool(self._judged[first : first + length].any())
                seed, episode = self._ids[number] if number < len(self._ids) else (0, int(line["episode_index"]))
                meta = EpisodeMeta(
                    episode_id=episode,
                    seed=seed,
                    attempt=0,
                    length=length,
                    success=success,
                    diverged=False,
                    episode_return=math.nan,
                    instruction=str(line["tasks"][0]) if line.get("tasks") else "",
                )
                yield LeRobotEpisode(self, meta, first)

    def rows(self, name: str) -> Array:
        """Return one array of all episodes, end to end; not to be written to."""
        key = self._key_of[name]
        if key in self._columns:
            return self._columns[key]
        if key not in self._frames:
            with parsing(self.path):
                self._frames[key] = self._decode_images(key, self.fields[name])
        return self._frames[key]

    def _read_columns(self) -> dict[str, Array]:
        """Return the numbers of all episodes, in the order of ``index``."""
        tables = read_parquet(self.path, "data")
        rows = sum(len(table) for table in tables)
        if rows != int(self._info["total_frames"]):
            raise DataError(f"{self.path}: expected {self._info['total_frames']} rows in data, got {rows}")
        order = np.argsort(np.concatenate([np.asarray(table["index"]) for table in tables]), kind="stable")
        found: dict[str, Array] = {}
        wanted = {key: self.fields[name] for name, key in self._key_of.items()}
        wanted["next.success"] = Field(name="next.success", dtype=np.dtype(np.bool_), shape=())
        for key, field in wanted.items():
            if key in tables[0].column_names:
                parts = [_numbers(table[key]).reshape(len(table), *field.shape) for table in tables]
                found[key] = np.concatenate(parts)[order].astype(field.dtype, copy=False)
        return found

    def _decode_images(self, key: str, field: Field) -> Array:
        """Decode the images of a video feature once, file by file, into a file that goes with its last reader."""
        total = int(self._info["total_frames"])
        with tempfile.TemporaryFile(prefix="headrace-frames-") as file:
            try:
                disk.reserve(file.fileno(), total * field.row_bytes)
            except OSError as error:
                needed = f"{total * field.row_bytes:,} bytes in {tempfile.gettempdir()}"
                raise DataError(
                    f"{self.path}: decoding {key} needs {needed}: {error.strerror}; set TMPDIR to a place with room"
                ) from error
            frames: NDArray[np.uint8] = np.memmap(file, np.uint8, "r+", shape=(total, *field.shape))
        fps = float(self._info["fps"])
        for path, lines in video_files(self.path, self._info, key, self._lines).items():
            # where each frame of the video goes: the row of its episode and step
            begins = [round(float(line[f"videos/{key}/from_timestamp"]) * fps) for line in lines]
            target = {
                begin + step: int(line["dataset_from_index"]) + step
                for begin, line in zip(begins, lines, strict=True)
                for step in range(int(line["length"]))
            }
            for number, frame in enumerate(decode_frames(path)):
                row = target.pop(number, None)
                if row is not None:
                    if frame.shape != field.shape:
                        raise DataError(f"{path}: expected images {field.shape}, got {frame.shape}")
                    frames[row] = frame
            if target:
                raise DataError(f"{path}: {len(target)} frames of its episodes are missing; the video was cut short")
        return frames


def _numbers(column: Any) -> Array:
    """Return a parquet column of numbers, or of (nested) lists of them, flat."""
    values = column.combine_chunks()
    while hasattr(values, "flatten") and str(values.type).startswith(("list", "fixed_size_list", "large_list")):
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False)


def _field_name(key: str) -> str | None:
    """Return which array a feature of LeRobot's is; None for what no policy reads."""
    if key in _FIELDS:
        return _FIELDS[key]
    if key.startswith(_IMAGES):
        return f"obs/{key.removeprefix(_IMAGES)}"
    return f"obs/{key.removeprefix(_OBSERVATION)}" if key.startswith(_OBSERVATION) else None


def _field(name: str, key: str, feature: Mapping[str, Any], path: Path) -> Field:
    kind, shape = str(feature["dtype"]), tuple(int(size) for size in cast("Sequence[int]", feature["shape"]))
    if kind == "image":
        raise DataError(
            f"{path}: {key} has images inside its parquet files, which headrace does not read; convert them to video"
        )
    if kind == "video":
        names = cast("Sequence[str] | None", feature.get("names"))
        if names and names[0].startswith("channel"):  # decoded frames are (H, W, C), whatever the metadata's order
            shape = (*shape[1:], shape[0])
        return Field(name=name, dtype=np.dtype(np.uint8), shape=shape)
    return Field(name=name, dtype=np.dtype(kind), shape=shape)
