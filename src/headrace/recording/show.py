"""Looking at a dataset: a table of its episodes.

Checking a dataset of any of our formats: hashes, lengths, order, timestamps, and frames of videos.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.markup import escape
from rich.table import Table

from headrace.errors import DataError
from headrace.files import parsing, read_json
from headrace.recording._video import frame_times
from headrace.recording.dataset import Episode, EpisodeDataset
from headrace.recording.export.hdf5 import open_hdf5, plain_arrays
from headrace.recording.export.lerobot_dataset import Line, read_episodes, read_parquet, video_files

_WORDS = {True: "yes", False: "no", None: "–"}


def episode_table(dataset: EpisodeDataset, *, limit: int = 20) -> Table:
    """Episodes with their outcome: the first ``limit`` rows, and a line of totals."""
    table = Table(title=escape(f"{dataset.path.name}: {dataset.info.source or 'episodes'}"))
    for name in ("seed", "episode", "steps", "return", "MB"):
        table.add_column(name, justify="right")
    table.add_column("success")
    for entry in dataset.entries[:limit]:
        episode = str(entry.episode_id) + (f" (try {entry.attempt + 1})" if entry.attempt else "")
        outcome = _WORDS[entry.success] + (", diverged" if entry.diverged else "")
        size = f"{entry.size / 1e6:.2f}"
        table.add_row(str(entry.seed), episode, str(entry.length), f"{entry.episode_return:.2f}", size, outcome)
    if len(dataset) > limit:
        table.add_row("", f"… {len(dataset) - limit} more", "", "", "", "")
    table.add_section()
    judged = [entry.success for entry in dataset.entries if entry.success is not None]
    share = f"{sum(judged)} of {len(judged)}" if judged else "–"
    megabytes = sum(entry.size for entry in dataset.entries) / 1e6
    returns = [entry.episode_return for entry in dataset.entries]
    mean = f"{np.mean(returns):.2f} mean" if returns else "–"
    table.add_row("", f"{len(dataset)} in all", str(dataset.steps), mean, f"{megabytes:.2f}", share)
    return table


def field_table(episode: Episode) -> Table:
    """Return what an episode of the dataset is made of."""
    table = Table(title="fields")
    for name in ("name", "dtype", "row", "rows"):
        table.add_column(name)
    for field in episode.fields:
        table.add_row(escape(field.name), str(field.dtype), str(field.shape), "T + 1" if field.with_first else "T")
    return table


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
    with parsing(path):
        problems = tuple(check[kind](path, counts))
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
        yield from _check_groups(data, path, "data/", ("demo", "num_samples"), counts)
        if int(data.attrs["total"]) != counts[1]:
            yield f"data: total says {data.attrs['total']} samples, the demonstrations have {counts[1]}"
        masks: Any = file.get("mask", {})
        for mask in masks:
            unknown = [text.decode() for text in masks[mask][()] if text.decode() not in data]
            if unknown:
                yield f"mask/{mask}: names {unknown[0]}, which is not in the file"


def _check_minari(path: Path, counts: list[int]) -> Iterator[str]:
    metadata = read_json(path / "data" / "metadata.json")
    with open_hdf5(path / "data" / "main_data.hdf5", "r") as file:
        yield from _check_groups(file, path, "", ("episode", "total_steps"), counts)
    yield from _check_totals(metadata, ("total_episodes", "total_steps"), counts, "metadata.json", "file has")


def _check_groups(data: Any, path: Path, where: str, kind: tuple[str, str], counts: list[int]) -> Iterator[str]:
    """Compare the arrays of every episode in an HDF5 file with its length; ``kind``: its name and the attribute."""
    name, attribute = kind
    if list(data) != [f"{name}_{number}" for number in range(len(data))]:
        yield f"{where or 'file'}: episodes are not {name}_0, {name}_1, … in natural order"
    for group in data:
        length = int(data[group].attrs[attribute])
        counts[:] = counts[0] + 1, counts[1] + length
        for key, array in plain_arrays(data[group], f"{path}: {where}{group}"):
            expected = length + (key.startswith("observations") or key == "infos/states")
            if len(array) != (1 if key.startswith("initial_state/") else expected):
                yield f"{where}{group}/{key}: {len(array)} rows, expected {expected} for {length} steps"


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
        try:
            times = np.array(frame_times(file))
        except DataError as error:
            yield str(error) if file.exists() else f"{name}: missing"
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
