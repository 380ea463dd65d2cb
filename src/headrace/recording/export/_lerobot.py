"""LeRobot's dataset layout, codebase version 3.0: parquet for numbers, mp4 for images, metadata and statistics.

One step is one row: the observation, the action that answered to it, and what followed (``next.reward``,
``next.done``, ``next.success``). The last observation of an episode has no row in this format.

``meta/headrace.json`` beside LeRobot's own files says which field each feature comes from and which episodes these are.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError, UnknownNameError, require_extra
from headrace.recording._video import Mp4Writer, pixel_format
from headrace.recording.dataset import Episode, EpisodeDataset
from headrace.recording.export._lerobot_stats import Stats, combine, image_stats, sample_rows, vector_stats
from headrace.recording.export.exporting import Exporter
from headrace.recording.fields import Array, Field, can_be_shown, is_image, newest_rgb
from headrace.types import StackSpec

CHUNK = 1000
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_COUNTERS = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
_PLAIN = {
    "actions": "action",
    "processed_actions": "processed_action",
    "rewards": "next.reward",
    "states": "observation.environment_state",
    "substeps": "observation.environment_substates",
}
_MOST_FPS = 1_000_000
_CAMERA = re.compile(r"[A-Za-z0-9_.-]{1,100}")
ABOUT = "meta/headrace.json"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A column or a video, and the episode's field it comes from."""

    key: str
    field: Field
    is_video: bool = False
    stack: StackSpec | None = None
    """How a video's field stacks its frames; the newest one is exported."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As LeRobot writes it: a number alone has shape (1,), a video (H, W, 3)."""
        if self.is_video:
            return self.images(np.zeros((1, *self.field.shape), np.uint8)).shape[1:]
        return self.field.shape or (1,)

    def images(self, rows: Array) -> NDArray[np.uint8]:
        """Return the newest frame of each row, uint8 (T, H, W, 3)."""
        return newest_rgb(rows, self.stack)


def plan_features(
    fields: Sequence[Field], stacks: Mapping[str, StackSpec], cameras: Mapping[str, str]
) -> list[Feature]:
    """Return which feature each field becomes. Fields without numbers (an empty dimension) have no place in the format.

    Args:
        fields: of the episodes.
        stacks: image fields that are stacks of frames.
        cameras: image field → name of its camera; the observation group where a field is not named.
    """
    names = {field.name for field in fields}
    unknown = sorted((cameras.keys() | stacks.keys()) - names)
    if unknown:
        raise UnknownNameError("field", unknown[0], names)
    for name in sorted(cameras.keys() | stacks.keys()):
        if not name.startswith("obs/"):
            raise ConfigError(f"LeRobot: expected an image field as a camera or stack, got {name}; leave it out")
        if not _CAMERA.fullmatch(cameras.get(name, "camera")):
            raise ConfigError(
                f"LeRobot: expected letters, digits, '_', '-' and '.' as the name of a camera, got {cameras[name]!r}"
            )
    features: list[Feature] = []
    for field in fields:
        if not field.row_bytes:
            continue
        if field.name in _PLAIN:
            features.append(Feature(key=_PLAIN[field.name], field=field))
        elif field.name.startswith("obs/"):
            stack = stacks.get(field.name)
            path = field.name.removeprefix("obs/").replace("/", ".")
            frame = field if stack is None else replace(field, shape=stack.frame_shape(field.shape))
            if can_be_shown(frame):
                key = f"observation.images.{cameras.get(field.name, path)}"
                features.append(Feature(key=key, field=field, is_video=True, stack=stack))
                continue
            if field.name in cameras or (is_image(field.shape) and field.dtype == np.uint8):
                raise ConfigError(
                    f"LeRobot: {field.name} is {field.dtype}{field.shape}, which is no image with 1, 3 or 4 channels; "
                    "if it is a stack of frames, record with DatasetInfo.of(env), or say how many: "
                    f"stacks={{{field.name!r}: StackSpec(frames=K, dim=-1)}} (--stack {field.name}=K)"
                )
            if field.name == "obs/policy" and "obs/state" not in names:
                path = "state"
            features.append(Feature(key=f"observation.{path}", field=field))
    keys = [feature.key for feature in features]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(
            f"LeRobot: two fields would become {twice[0]}; give the cameras different names (--camera-name)"
        )
    return features


class LeRobotExporter(Exporter):
    """Writes one dataset directory: parquet files with some episodes each, and a video beside each for every camera."""

    space = 1
    file_bytes = 256 << 20
    """Episode bytes after which a file is full."""

    def __init__(
        self, dataset: EpisodeDataset, *, fps: float | None, cameras: Mapping[str, str], stacks: Mapping[str, StackSpec]
    ) -> None:
        super().__init__(dataset)
        self._cameras, self._stacks = cameras, stacks
        wanted = dataset.info.fps if fps is None else fps
        if wanted is None:
            raise ConfigError("LeRobot: needs fps, and the dataset does not say; pass fps (--fps)")
        if not 1 <= wanted <= _MOST_FPS or wanted % 1:
            raise ConfigError(
                f"LeRobot: expected fps to be a whole number from 1 to {_MOST_FPS:,}, got {wanted}; pass the one you "
                "train with (--fps)"
            )
        self._fps = int(wanted)
        usual = dataset.info.instruction or dataset.info.source or "task"
        self._task_of = [entry.instruction or usual for entry in dataset.entries]
        self._tasks = list(dict.fromkeys(self._task_of))
        self._features: list[Feature] = []
        self._videos: list[Feature] = []
        self._flags: list[str] = []
        self._judged = all(entry.success is not None for entry in dataset.entries)
        self._arrow = require_extra("pyarrow", extra="record", purpose="LeRobot's parquet files")
        self._parquet = require_extra("pyarrow.parquet", extra="record", purpose="LeRobot's parquet files")

    def check(self, fields: Sequence[Field], target: Path) -> None:
        """Refuse fields that a LeRobot dataset cannot hold: it has actions and observations of at most 5 axes."""
        stacks = {field.name: stack for field in fields if (stack := self._dataset.info.stack(field.name)) is not None}
        self._features = plan_features(fields, {**stacks, **self._stacks}, self._cameras)
        self._videos = [feature for feature in self._features if feature.is_video]
        has_flags = any(field.name == "terminated" for field in fields)
        self._flags = ["next.done"] * has_flags + ["next.success"] * self._judged
        keys = [feature.key for feature in self._features]
        if "action" not in keys or not any(key.startswith("observation.") for key in keys):
            raise ConfigError(f"LeRobot: needs observations and actions, got {', '.join(keys)}; record both")
        deep = [feature.key for feature in self._features if len(feature.shape) > 5]
        if deep:
            raise ConfigError(f"LeRobot: {deep[0]} has more than 5 dimensions, the most that it knows; leave it out")
        if target.suffix:
            raise ConfigError(f"LeRobot: expected a directory as target, got {target}")

    def _describe_features(self) -> dict[str, Any]:
        """Feature → where it comes from and what it is, with the flags that the rows have."""
        found: dict[str, Any] = {
            feature.key: {"field": feature.field.name, "dtype": str(feature.field.dtype), "shape": list(feature.shape)}
            for feature in self._features
        }
        return found | dict.fromkeys(self._flags, True)

    def write(self, out: Path, episodes: Iterable[Episode]) -> None:
        """Write data and videos, file by file, then the metadata."""
        lines: list[dict[str, Any]] = []
        rest = iter(episodes)
        for index in itertools.count():
            found = self._write_files(out, index, rest, len(lines), sum(line["length"] for line in lines))
            if not found:
                break
            lines += found
        self._write_metadata(out, lines)

    def _write_files(
        self, out: Path, index: int, episodes: Iterator[Episode], number: int, step: int
    ) -> list[dict[str, Any]]:
        """Write the next parquet file and its videos; returns the metadata of each episode in them, the first of which
        is ``number`` and begins with row ``step``."""
        place = {"chunk_index": index // CHUNK, "file_index": index % CHUNK}
        lines: list[dict[str, Any]] = []
        size = 0
        with ExitStack() as held:
            writer: Any = None
            videos: dict[str, Mp4Writer] = {}
            while size < self.file_bytes and (episode := next(episodes, None)) is not None:
                size += episode.entry.size
                columns = dict(self._columns(episode, number, step))
                table = self._arrow.table({key: _column(self._arrow, values) for key, values in columns.items()})
                if writer is None:
                    data = out / DATA_PATH.format(**place)
                    data.parent.mkdir(parents=True, exist_ok=True)
                    writer = held.enter_context(self._parquet.ParquetWriter(data, table.schema, compression="snappy"))
                    for feature in self._videos:
                        video = out / VIDEO_PATH.format(video_key=feature.key, **place)
                        video.parent.mkdir(parents=True, exist_ok=True)
                        videos[feature.key] = Mp4Writer(video, self._fps, *feature.shape[:2])
                        held.callback(videos[feature.key].close)
                writer.write_table(table)
                stats = {key: vector_stats(values) for key, values in columns.items()}
                line = {
                    "episode_index": number,
                    "tasks": [self._task_of[number]],
                    "length": episode.meta.length,
                    **{f"data/{name}": value for name, value in place.items()},
                    "dataset_from_index": step,
                    "dataset_to_index": step + episode.meta.length,
                    "meta/episodes/chunk_index": 0,
                    "meta/episodes/file_index": 0,
                }
                for feature in self._videos:
                    start = videos[feature.key].frames
                    stats[feature.key] = self._add_video(videos[feature.key], feature, episode)
                    times = {"from_timestamp": start, "to_timestamp": videos[feature.key].frames}
                    there = place | {name: frames / self._fps for name, frames in times.items()}
                    line |= {f"videos/{feature.key}/{name}": value for name, value in there.items()}
                for key, each in stats.items():
                    line |= {f"stats/{key}/{name}": _plain(name, values) for name, values in each.items()}
                lines.append(line)
                number, step = number + 1, step + episode.meta.length
        return lines

    def _columns(self, episode: Episode, number: int, first_step: int) -> Iterator[tuple[str, Array]]:
        length = episode.meta.length
        for feature in self._features:
            if not feature.is_video:
                yield feature.key, episode.read(feature.field.name, 0, length)
        if "next.done" in self._flags:
            yield "next.done", episode.read("terminated") | episode.read("truncated")
        if self._judged:
            success = np.zeros(length, np.bool_)
            success[-1] = bool(episode.meta.success)
            yield "next.success", success
        steps = np.arange(length)
        yield "timestamp", (steps / self._fps).astype(np.float32)
        yield "frame_index", steps
        yield "episode_index", np.full(length, number)
        yield "index", first_step + steps
        yield "task_index", np.full(length, self._tasks.index(self._task_of[number]))

    def _add_video(self, video: Mp4Writer, feature: Feature, episode: Episode) -> Stats:
        length = episode.meta.length
        wanted = set(sample_rows(length).tolist())
        kept: list[NDArray[np.uint8]] = []
        for start in range(0, length, 64):
            block = episode.read(feature.field.name, start, min(start + 64, length))
            for row, picture in enumerate(feature.images(block), start=start):
                video.add(picture)
                if row in wanted:
                    kept.append(picture)
        return image_stats(np.stack(kept))

    def _write_metadata(self, out: Path, lines: Sequence[dict[str, Any]]) -> None:
        episodes = Path("meta") / "episodes" / "chunk-000" / "file-000.parquet"
        (out / episodes).parent.mkdir(parents=True)
        self._parquet.write_table(self._arrow.Table.from_pylist(list(lines)), out / episodes, compression="snappy")
        (out / "meta" / "info.json").write_text(json.dumps(self._info(lines), indent=4))
        stats = combine([_stats_of(line) for line in lines])
        plain = {key: {name: _plain(name, values) for name, values in each.items()} for key, each in stats.items()}
        (out / "meta" / "stats.json").write_text(json.dumps(plain, indent=4))
        self._parquet.write_table(_task_table(self._arrow, self._tasks), out / "meta" / "tasks.parquet")
        about = {
            "version": VERSION,
            "features": self._describe_features(),
            "episodes": [[*entry.key, entry.directory_sha256] for entry in self._dataset.entries],
            "recipe": dict(self._dataset.info.recipe),
        }
        (out / ABOUT).write_text(json.dumps(about))

    def _info(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        features: dict[str, dict[str, Any]] = {}
        for feature in self._features:
            names = ["height", "width", "channels"] if feature.is_video else None
            dtype = "video" if feature.is_video else str(feature.field.dtype)
            features[feature.key] = {"dtype": dtype, "shape": list(feature.shape), "names": names}
            if feature.is_video:
                features[feature.key]["info"] = _video_info(feature, self._fps)
        for key, dtype in (dict.fromkeys(self._flags, "bool") | _COUNTERS).items():
            features[key] = {"dtype": dtype, "shape": [1], "names": None}
        return {
            "codebase_version": "v3.0",
            "robot_type": self._dataset.info.robot_type,
            "total_episodes": len(lines),
            "total_frames": self._dataset.steps,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": self._fps,
            "splits": {"train": f"0:{len(lines)}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._videos else None,
            "features": features,
        }


def _video_info(feature: Feature, fps: int) -> dict[str, Any]:
    height, width = feature.shape[:2]
    return {
        "video.height": height,
        "video.width": width,
        "video.codec": "h264",
        "video.pix_fmt": pixel_format(height, width),
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }


def _column(arrow: Any, values: Array) -> Any:
    """Return rows (T, …) as an arrow column: numbers, lists of fixed length, or lists of lists."""
    column = arrow.array(np.ascontiguousarray(values).reshape(-1))
    if values.ndim == 2 and values.shape[1] == 1:
        return column
    if values.ndim == 2:
        return arrow.FixedSizeListArray.from_arrays(column, values.shape[1])
    for size in reversed(values.shape[1:]):
        offsets = np.arange(0, len(column) + 1, size, dtype=np.int32)
        column = arrow.ListArray.from_arrays(offsets, column)
    return column


def _plain(name: str, values: NDArray[np.float64]) -> list[Any]:
    return values.astype(np.int64).tolist() if name == "count" else values.tolist()


def _stats_of(line: Mapping[str, Any]) -> dict[str, Stats]:
    stats: dict[str, Stats] = {}
    for column, values in line.items():
        if column.startswith("stats/"):
            _, key, name = column.split("/")
            stats.setdefault(key, {})[name] = np.asarray(values, np.float64)
    return stats


def _task_table(arrow: Any, tasks: Sequence[str]) -> Any:
    """Return the list of tasks as pandas reads it: the words are the index."""
    table = arrow.table({"task_index": arrow.array(range(len(tasks)), arrow.int64()), "task": list(tasks)})
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.2.0"}
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})
