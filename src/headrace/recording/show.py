"""Looking at a dataset: a table of its episodes, and a contact sheet of their images.

Checking a dataset of any of our formats: hashes, lengths, order, timestamps, and frames of videos.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from headrace.errors import ConfigError, DataError, require_extra
from headrace.files import read_json, write_whole
from headrace.recording._video import frame_times
from headrace.recording.dataset import Episode, EpisodeDataset
from headrace.recording.export.hdf5 import open_hdf5, row_counts
from headrace.recording.export.lerobot_dataset import Line, read_episodes, read_parquet, video_files
from headrace.recording.fields import can_be_shown, enlarge, newest_rgb

if TYPE_CHECKING:
    from PIL import Image

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


def contact_sheet(
    dataset: EpisodeDataset, path: Path, *, camera: str | None = None, episodes: int = 8, frames: int = 8
) -> Path:
    """Return an image with a line for each episode: ``frames`` of its images, from the first to the last.

    Args:
        dataset: its first ``episodes`` are shown.
        path: PNG file to write.
        camera: which array; the first that has images where None.
        episodes: lines at most.
        frames: images in a line.
    """
    images = require_extra("PIL.Image", extra="record", purpose="a contact sheet")
    drawing = require_extra("PIL.ImageDraw", extra="record", purpose="a contact sheet")
    if not len(dataset):
        raise ConfigError(f"contact sheet: expected an episode in {dataset.path}, got none; record some first")
    stacks = {name: stack for name in dataset[0].names if (stack := dataset.info.stack(name)) is not None}
    cameras = sorted({*(field.name for field in dataset[0].fields if can_be_shown(field)), *stacks})
    chosen = camera or (cameras[0] if cameras else None)
    if chosen is None or chosen not in cameras:
        wanted = "images" if camera is None else f"images named {camera!r}"
        got = f"images {', '.join(cameras)}" if cameras else f"only {', '.join(sorted(dataset[0].names))}"
        raise ConfigError(
            f"contact sheet: expected {wanted} in the dataset (uint8, with 1, 3 or 4 channels), got {got}; record a "
            "camera"
        )

    def image(episode: Episode, row: int) -> NDArray[np.uint8]:
        """Return one image (H, W, 3); small ones are shown larger, so that the text beside them can be read."""
        return enlarge(newest_rgb(episode.read(chosen, row, row + 1), stacks.get(chosen)), 64)[0]

    lines = [dataset[number] for number in range(min(episodes, len(dataset)))]
    height, width = image(dataset[0], 0).shape[:2]
    margin = 14
    sheet: Image.Image = images.new("RGB", (frames * width, len(lines) * (height + margin)), "black")
    draw = drawing.Draw(sheet)
    for number, episode in enumerate(lines):
        meta, top = episode.meta, number * (height + margin)
        words = f"episode {meta.episode_id}  {meta.length} steps  return {meta.episode_return:.2f}"
        draw.text((2, top + 1), f"{words}  success {_WORDS[meta.success].replace('–', '-')}", fill="white")
        for column, row in enumerate(np.linspace(0, meta.length, frames).round().astype(int).tolist()):
            sheet.paste(images.fromarray(image(episode, row)), (column * width, top + margin))
    content = io.BytesIO()
    sheet.save(content, format="PNG")
    write_whole(path, content.getvalue())
    return path


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
