"""Checking a dataset of any of our formats: hashes, lengths, order, timestamps, and frames of videos."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.errors import DataError
from headrace.files import read_json
from headrace.recording._video import frame_times
from headrace.recording.dataset import Episode, EpisodeDataset
from headrace.recording.export.hdf5 import open_hdf5, row_counts
from headrace.recording.export.lerobot_dataset import Line, read_episodes, read_parquet, video_files

Kind = Literal["headrace", "robomimic", "lerobot", "minari"]

TOLERANCE_S = 1e-4
"""What LeRobot allows between a row's timestamp and its video frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetCheck:
    """What a check found."""

    kind: Kind
    episodes: int
    steps: int
    problems: tuple[str, ...]
    """Empty if all is well."""


def detect_kind(path: Path) -> Kind:
    """Return which of the formats is at ``path``."""
    if path.is_file():
        return "robomimic"
    signs: tuple[tuple[str, Kind], ...] = (
        ("dataset.json", "headrace"),
        ("meta/info.json", "lerobot"),
        ("data/metadata.json", "minari"),
    )
    for file, kind in signs:
        if (path / file).exists():
            return kind
    raise DataError(f"{path}: expected an episode dataset, a robomimic .hdf5 file, a LeRobot or a Minari directory")


def verify_dataset(path: Path | str) -> DatasetCheck:
    """Check everything that can be checked without the environment."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path}: expected a dataset directory or an .hdf5 file, got nothing there; check the path")
    kind = detect_kind(path)
    check = {
        "headrace": _check_store,
        "robomimic": _check_robomimic,
        "lerobot": _check_lerobot,
        "minari": _check_minari,
    }
    counts = [0, 0]
    try:
        problems = tuple(check[kind](path, counts))
    except DataError:
        raise
    # what the formats' own libraries raise for files that are cut or are of another kind
    except (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise DataError(f"{path}: not a whole {kind} dataset: {error!r}; write it again") from error
    return DatasetCheck(kind=kind, episodes=counts[0], steps=counts[1], problems=problems)


def _check_store(path: Path, counts: list[int]) -> Iterator[str]:
    dataset = EpisodeDataset(path)
    counts[:] = len(dataset), dataset.steps
    keys = [entry.key for entry in dataset.entries]
    if len(set(keys)) != len(keys):
        yield "journal.jsonl: an episode has more than one line"
    for episode in dataset:
        try:
            episode.entry.check(path)
            yield from _check_episode(episode)
        except DataError as error:
            yield str(error)


def _check_episode(episode: Episode) -> Iterator[str]:
    where = f"{episode.entry.file}: "
    for name in episode.names:
        field = episode.field(name)
        expected = name == "states" or name.startswith("obs/")
        if field.with_first != expected:
            yield f"{where}{name} has {field.rows(episode.meta.length)} rows for {episode.meta.length} steps"
    if "terminated" in episode.names:
        done = episode.read("terminated") | episode.read("truncated")
        if not done[-1] or done[:-1].any():
            yield f"{where}flags do not end the episode in its last step, and there alone"


def _check_robomimic(path: Path, counts: list[int]) -> Iterator[str]:
    with open_hdf5(path, "r") as file:
        data: Any = file["data"]
        names = list(data)
        if names != [f"demo_{number}" for number in range(len(names))]:
            yield "data: demonstrations are not demo_0, demo_1, … in natural order"
        for name in names:
            length = _count(data[name].attrs["num_samples"], counts)
            for key, rows in row_counts(data[name]):
                expected = 1 if key.startswith("initial_state/") else length
                if rows != expected:
                    yield f"data/{name}/{key}: {rows} rows, expected {expected}"
        if int(data.attrs["total"]) != counts[1]:
            yield f"data: total says {data.attrs['total']} samples, the demonstrations have {counts[1]}"
        masks: Any = file.get("mask", {})
        for mask in masks:
            unknown = [text.decode() for text in masks[mask][()] if text.decode() not in names]
            if unknown:
                yield f"mask/{mask}: names {unknown[0]}, which is not in the file"


def _check_minari(path: Path, counts: list[int]) -> Iterator[str]:
    metadata = read_json(path / "data" / "metadata.json")
    with open_hdf5(path / "data" / "main_data.hdf5", "r") as file:
        for number in range(len(file)):
            if f"episode_{number}" not in file:
                yield f"main_data.hdf5: episode_{number} is missing"
                continue
            group: Any = file[f"episode_{number}"]
            length = _count(group.attrs["total_steps"], counts)
            for key, rows in row_counts(group):
                extra = key.startswith("observations") or key == "infos/states"
                if rows != length + extra:
                    yield f"episode_{number}/{key}: {rows} rows, expected {length + extra}"
    yield from _check_totals(metadata, ("total_episodes", "total_steps"), counts, "metadata.json", "file has")


def _count(steps: int, counts: list[int]) -> int:
    """Add an episode; returns its length."""
    counts[:] = counts[0] + 1, counts[1] + int(steps)
    return int(steps)


def _check_totals(
    said: Mapping[str, Any], names: tuple[str, str], counts: list[int], where: str, found: str
) -> Iterator[str]:
    for name, count in zip(names, counts, strict=True):
        if said[name] != count:
            yield f"{where}: {name} says {said[name]}, the {found} {count}"


def _check_lerobot(path: Path, counts: list[int]) -> Iterator[str]:
    info = read_json(path / "meta" / "info.json")
    fps, lines = info["fps"], read_episodes(path)
    names = ["timestamp", "frame_index", "episode_index", "index"]
    tables = read_parquet(path, "data", names)
    columns = {name: np.concatenate([table[name].to_numpy() for table in tables]) for name in names}
    counts[:] = len(lines), len(columns["index"])
    yield from _check_totals(info, ("total_episodes", "total_frames"), counts, "meta/info.json", "files have")
    if not np.array_equal(columns["index"], np.arange(counts[1])):
        yield "data: index does not count the rows"
    late = np.abs(columns["timestamp"] - columns["frame_index"] / fps) > TOLERANCE_S
    if late.any():
        yield f"data: row {int(np.flatnonzero(late)[0])} has a timestamp that is not frame_index / fps"
    for line in lines:
        number, first, last = line["episode_index"], line["dataset_from_index"], line["dataset_to_index"]
        rows, numbers = columns["frame_index"][first:last], columns["episode_index"][first:last]
        if last - first != line["length"]:
            yield f"meta/episodes: episode {number} has length {line['length']}, its rows are {first} to {last}"
        elif not np.array_equal(rows, np.arange(last - first)) or (numbers != number).any():
            yield f"data: rows {first} to {last} are not those of episode {number}"
    for key, feature in info["features"].items():
        if feature["dtype"] == "video":
            yield from _check_videos(path, info, key, lines)


def _check_videos(path: Path, info: dict[str, Any], key: str, lines: list[Line]) -> Iterator[str]:
    for file, inside in video_files(path, info, key, lines).items():
        name = file.relative_to(path)
        if not file.exists():
            yield f"{name}: missing"
            continue
        try:
            times = np.array(frame_times(file))
        except DataError as error:
            yield str(error)
            continue
        expected = sum(line["length"] for line in inside)
        if len(times) != expected:
            yield f"{name}: {len(times)} frames, its episodes have {expected} rows"
            continue
        if np.abs(times - np.arange(expected) / info["fps"]).max() > TOLERANCE_S:
            yield f"{name}: frames are not {1 / info['fps']:.4f} s apart"
        for line in inside:
            span = line[f"videos/{key}/to_timestamp"] - line[f"videos/{key}/from_timestamp"]
            if abs(span - line["length"] / info["fps"]) > TOLERANCE_S:
                yield f"{name}: episode {line['episode_index']} spans {span:.4f} s for {line['length']} rows"
