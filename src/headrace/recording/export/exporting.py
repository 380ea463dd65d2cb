"""Assemble a dataset in another format from committed episodes: resumable, and there whole or not at all.

The work is cut into units of some episodes. A unit is written to a directory of its own inside ``<target>.partial`` and
renamed when it is whole; an export that was cut short finds the whole units and goes on behind them. At the end the
units are assembled, and one rename puts the result in its place.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace.errors import ConfigError, DataError, StorageError, UnknownNameError
from headrace.files import exchange, put_in_place, storage_error, write_whole
from headrace.recording.dataset import Episode, EpisodeDataset, Only
from headrace.recording.fields import Field
from headrace.types import StackSpec

if TYPE_CHECKING:
    from headrace.recording.export._lerobot import Appended

Format = Literal["robomimic", "lerobot", "minari"]
FORMATS: tuple[Format, ...] = ("robomimic", "lerobot", "minari")

_PLAN = "plan.json"

Progress = Callable[[int, int], None]
"""Called with (episodes done, episodes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Some consecutive episodes of an export."""

    index: int = 0
    first_episode: int = 0
    """Number of its first episode in the export."""
    first_step: int = 0
    episodes: tuple[Episode, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What a format must be told where the dataset does not say."""

    fps: float | None = None
    cameras: Mapping[str, str] = field(default_factory=dict[str, str])
    stacks: Mapping[str, StackSpec] = field(default_factory=dict[str, StackSpec])


class Exporter(ABC):
    """One format."""

    unit_bytes = 256 << 20
    """Episode bytes after which a unit is full."""
    space: int
    """Bytes of disk that an export takes at most while it runs, for each byte of the episodes."""
    start = Unit()
    """Where it begins to count; not at 0 where episodes are appended."""

    def __init__(self, dataset: EpisodeDataset) -> None:
        self._dataset = dataset

    @abstractmethod
    def check(self, fields: Sequence[Field], target: Path) -> None:
        """Refuse what the format cannot hold, before anything is written."""

    @abstractmethod
    def write_unit(self, unit: Unit, folder: Path) -> None:
        """Write a unit's files into a new directory."""

    @abstractmethod
    def assemble(self, units: Sequence[Path], out: Path) -> None:
        """Put whole units together at ``out``, a file or directory that does not exist; the units stay as they are."""


def export_dataset(
    source: Path | str,
    target: Path | str,
    to: Format,
    *,
    only: Only | Literal["failed_apart"] = "all",
    min_length: int = 0,
    fps: float | None = None,
    cameras: Mapping[str, str] | None = None,
    stacks: Mapping[str, StackSpec] | None = None,
    append: bool = False,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the committed episodes of a dataset in another format.

    Args:
        source: the directory that an ``EpisodeRecorder`` wrote.
        target: file (robomimic) or directory (LeRobot, Minari) to make; must not exist, unless ``append``.
        to: the format.
        only: which episodes; ``failed_apart`` makes two datasets, the failed ones at ``<target>_failed``.
        min_length: leave out shorter episodes.
        fps: steps per second, in place of what the dataset says.
        cameras: LeRobot: image field → name of its camera; ``{"obs/policy": "front"}`` gives
            ``observation.images.front``. The observation group where a field is not named.
        stacks: LeRobot: image fields that are stacks of frames, where the dataset does not say.
        append: LeRobot: add the episodes that an export does not have yet; it is replaced in one step.
        progress: called with the episodes done and all episodes.

    Returns:
        What was made or appended to.
    """
    if to not in FORMATS:
        raise UnknownNameError("format", to, FORMATS)
    if to != "lerobot" and (append or cameras or stacks):
        raise ConfigError(f"append, cameras, stacks: only LeRobot exports have them, got {to}; leave them out")
    options = ExportOptions(fps=fps, cameras=cameras or {}, stacks=stacks or {})
    target = Path(target)
    parts: list[tuple[Only, Path]] = [("succeeded", target), ("failed", _failed_target(target, to))]
    if only != "failed_apart":
        parts = [(only, target)]
    made: list[Path] = []
    for part, place in parts:
        dataset = EpisodeDataset(source, only=part, min_length=min_length)
        if len(dataset) or only != "failed_apart":
            made.append(_export(dataset, place, to, options, progress, append=append))
    return made


def _failed_target(target: Path, to: Format) -> Path:
    if to == "minari":
        stem, _, version = target.name.rpartition("-v")
        return target.with_name(f"{stem}_failed-v{version}")
    return target.with_name(f"{target.stem}_failed{target.suffix}")


def _export(
    dataset: EpisodeDataset,
    target: Path,
    to: Format,
    options: ExportOptions,
    progress: Progress | None,
    *,
    append: bool,
) -> Path:
    if not len(dataset):
        raise DataError(
            f"{dataset.path}: no episode to export; record some, or choose others with only and min_length "
            "(--only, --min-length)"
        )
    appended = None
    if target.exists():
        if not append:
            raise ConfigError(f"{target}: already exists, and nothing is ever overwritten; choose another path")
        from headrace.recording.export._lerobot import Appended

        appended = Appended.read(target)
        dataset = _missing(dataset, target, appended.episodes)
        if not len(dataset):
            _forget_partial(_partial(target))
            return target
    exporter = _make_exporter(dataset, to, options, appended)
    exporter.check(_common_fields(dataset), target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(target.parent, error, "choose another target") from error
    # HDF5 answers a full disk with a broken file and a storm of messages: better to know before
    needed, free = exporter.space * sum(entry.size for entry in dataset.entries), shutil.disk_usage(target.parent).free
    if needed > free:
        raise StorageError(
            errno.ENOSPC, f"{target}: the export needs up to {needed:,} bytes, the disk has {free:,}; make room"
        )
    try:
        _assemble(dataset, target, exporter, _plan(dataset, to, exporter, options), progress)
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(target, error, "make room and start the export again: it goes on where it was") from error
    return target


def _missing(dataset: EpisodeDataset, target: Path, there: Mapping[tuple[int, int, int], str]) -> EpisodeDataset:
    """Return the dataset without the episodes that an export has; the same identity with other content is refused."""
    for entry in dataset.entries:
        if there.get(entry.key, entry.sha256) != entry.sha256:
            raise DataError(
                f"append: {target} has another episode of seed {entry.seed}, id {entry.episode_id}, attempt "
                f"{entry.attempt} than {dataset.path}; export to another directory"
            )
    rest = copy.copy(dataset)
    rest.entries = [entry for entry in dataset.entries if entry.key not in there]
    return rest


def _assemble(
    dataset: EpisodeDataset, target: Path, exporter: Exporter, plan: bytes, progress: Progress | None
) -> None:
    partial = _partial(target)
    _begin(partial, plan)
    done: list[Path] = []
    finished = 0
    for unit in _split(dataset, exporter.unit_bytes, exporter.start):
        folder = partial / f"unit-{unit.index:05d}"
        if not folder.exists():
            for episode in unit.episodes:
                episode.entry.check(dataset.path)
            part = partial / f"{folder.name}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            exporter.write_unit(unit, part)
            put_in_place(part, folder)
        done.append(folder)
        finished += len(unit.episodes)
        if progress is not None:
            progress(finished, len(dataset))
    out = partial / "out"
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)
    exporter.assemble(done, out)
    if target.exists():
        exchange(out, target)
    else:
        put_in_place(out, target)
    shutil.rmtree(partial)


def _make_exporter(dataset: EpisodeDataset, to: Format, options: ExportOptions, appended: Appended | None) -> Exporter:
    # each format brings its own library, which is loaded when it is asked for
    if to == "robomimic":
        from headrace.recording.export.hdf5 import RobomimicExporter

        return RobomimicExporter(dataset)
    if to == "minari":
        from headrace.recording.export.hdf5 import MinariExporter

        return MinariExporter(dataset)
    from headrace.recording.export._lerobot import LeRobotExporter

    return LeRobotExporter(dataset, options, appended)


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


def _plan(dataset: EpisodeDataset, to: Format, exporter: Exporter, options: ExportOptions) -> bytes:
    """Return what an export is made of; a partial one goes on only if this is the same."""
    digest = hashlib.sha256("".join(entry.sha256 for entry in dataset.entries).encode()).hexdigest()
    plan = {"to": to, "unit_bytes": exporter.unit_bytes, "episodes": len(dataset), "sha256": digest}
    start = exporter.start
    counted = {"unit": start.index, "episode": start.first_episode, "step": start.first_step}
    plan |= {"options": asdict(options), "start": counted}
    return json.dumps(plan).encode()


def _partial(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


def _begin(partial: Path, plan: bytes) -> None:
    file = partial / _PLAN
    if not file.exists() or file.read_bytes() != plan:
        # of another set of episodes, for example before more were recorded: begin again
        _forget_partial(partial)
    partial.mkdir(exist_ok=True)
    if not file.exists():
        write_whole(file, plan)


def _forget_partial(partial: Path) -> None:
    """Remove what an export that was cut short has left; what is not of an export is refused."""
    if not partial.exists():
        return
    if not partial.is_dir() or (any(partial.iterdir()) and not (partial / _PLAN).exists()):
        raise ConfigError(
            f"{partial}: expected the parts of an export that was cut short, got something else under its name; "
            "move it away, or choose another target"
        )
    shutil.rmtree(partial)


def _split(dataset: EpisodeDataset, unit_bytes: int, start: Unit) -> list[Unit]:
    units: list[Unit] = []
    held: list[Episode] = []
    size, first, step = 0, start.first_episode, start.first_step
    for number, episode in enumerate(dataset):
        held.append(episode)
        size += episode.entry.size
        if size >= unit_bytes or number == len(dataset) - 1:
            units.append(
                Unit(index=start.index + len(units), first_episode=first, first_step=step, episodes=tuple(held))
            )
            first += len(held)
            step += sum(episode.meta.length for episode in held)
            held, size = [], 0
    return units
