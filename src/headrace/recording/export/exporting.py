"""Write the committed episodes of a dataset in another format: the result is there whole or not at all."""

from __future__ import annotations

import errno
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from headrace.errors import ConfigError, DataError, StorageError, UnknownNameError
from headrace.files import write_directory, write_whole
from headrace.recording.dataset import Episode, EpisodeDataset, Only
from headrace.recording.fields import Field
from headrace.types import StackSpec

Format = Literal["robomimic", "lerobot", "minari"]
FORMATS: tuple[Format, ...] = ("robomimic", "lerobot", "minari")

Progress = Callable[[int, int], None]
"""Called with (episodes done, episodes in all)."""


class Exporter(ABC):
    """One format."""

    space: int
    """Bytes of disk that an export takes at most, for each byte of the episodes."""
    is_file = False
    """Whether an export is one file, not a directory."""

    def __init__(self, dataset: EpisodeDataset) -> None:
        self._dataset = dataset

    @abstractmethod
    def check(self, fields: Sequence[Field], target: Path) -> None:
        """Refuse what the format cannot hold, before anything is written."""

    @abstractmethod
    def write(self, out: Path, episodes: Iterable[Episode]) -> None:
        """Write all episodes to ``out``: a new file, or an empty directory."""


def export_dataset(
    source: Path | str,
    target: Path | str,
    to: Format,
    *,
    only: Only = "all",
    min_length: int = 0,
    fps: float | None = None,
    cameras: Mapping[str, str] | None = None,
    stacks: Mapping[str, StackSpec] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the committed episodes of a dataset in another format.

    Args:
        source: the directory that an ``EpisodeRecorder`` wrote.
        target: file (robomimic) or directory (LeRobot, Minari) to make; must not exist.
        to: the format.
        only: which episodes.
        min_length: leave out shorter episodes.
        fps: steps per second, in place of what the dataset says.
        cameras: LeRobot: image field → name of its camera; ``{"obs/policy": "front"}`` gives
            ``observation.images.front``. The observation group where a field is not named.
        stacks: LeRobot: image fields that are stacks of frames, where the dataset does not say.
        progress: called with the episodes done and all episodes.

    Returns:
        What was made.
    """
    if to not in FORMATS:
        raise UnknownNameError("format", to, FORMATS)
    if to != "lerobot" and (cameras or stacks):
        raise ConfigError(f"cameras, stacks: only LeRobot exports have them, got {to}; leave them out")
    dataset, target = EpisodeDataset(source, only=only, min_length=min_length), Path(target)
    if not len(dataset):
        raise DataError(
            f"{dataset.path}: no episode to export; record some, or choose others with only and min_length "
            "(--only, --min-length)"
        )
    if target.exists():
        raise ConfigError(f"{target}: already exists, and nothing is ever overwritten; choose another path")
    exporter: Exporter
    # each format brings its own library, which is loaded when it is asked for
    if to == "lerobot":
        from headrace.recording.export._lerobot import LeRobotExporter

        exporter = LeRobotExporter(dataset, fps=fps, cameras=cameras or {}, stacks=stacks or {})
    else:
        from headrace.recording.export.hdf5 import MinariExporter, RobomimicExporter

        exporter = RobomimicExporter(dataset) if to == "robomimic" else MinariExporter(dataset)
    exporter.check(_common_fields(dataset), target)
    # HDF5 answers a full disk with a broken file and a storm of messages: better to know before
    place = next(parent for parent in target.absolute().parents if parent.exists())
    needed, free = exporter.space * sum(entry.size for entry in dataset.entries), shutil.disk_usage(place).free
    if needed > free:
        raise StorageError(
            errno.ENOSPC, f"{target}: the export needs up to {needed:,} bytes, the disk has {free:,}; make room"
        )
    write = write_whole if exporter.is_file else write_directory
    write(target, lambda out: exporter.write(out, _read_checked(dataset, progress)))
    return target


def _read_checked(dataset: EpisodeDataset, progress: Progress | None) -> Iterator[Episode]:
    """Yield the episodes, each compared with the journal first."""
    for number, episode in enumerate(dataset, start=1):
        episode.check()
        yield episode
        if progress is not None:
            progress(number, len(dataset))


def _common_fields(dataset: EpisodeDataset) -> list[Field]:
    """Return the fields of the episodes, which must agree."""
    first = dataset[0].fields
    for episode in dataset:
        if episode.fields != first:
            raise DataError(
                f"{dataset.path}: episode {episode.meta.episode_id} has other fields than episode "
                f"{dataset.entries[0].episode_id}; export them apart"
            )
    return first
