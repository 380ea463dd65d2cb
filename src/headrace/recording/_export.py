"""Assembling a dataset in somebody else's format from committed episodes: resumable, and there whole or not at all.

The work is cut into units of some episodes. A unit is written to a folder of its own inside ``<target>.partial`` and
renamed when it is whole; an export that was cut short finds the whole units and goes on behind them. At the end the
units are assembled, and one rename puts the result in its place.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from headrace.errors import ConfigError, DataError, StorageError, UnknownNameError
from headrace.files import put_in_place, storage_error, write_whole
from headrace.recording._dataset import Episode, EpisodeDataset, Only
from headrace.recording._fields import Field

Format = Literal["robomimic", "lerobot", "minari"]
FORMATS: tuple[Format, ...] = ("robomimic", "lerobot", "minari")

Progress = Callable[[int, int], None]
"""Called with (episodes done, episodes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Some consecutive episodes of an export."""

    index: int
    first_episode: int
    """Number of its first episode in the export."""
    first_step: int
    episodes: tuple[Episode, ...]


class Exporter(Protocol):
    """One format."""

    unit_bytes: int
    """Episode bytes after which a unit is full."""
    space: int
    """Bytes of disk that an export takes at most while it runs, for each byte of the episodes."""

    def check(self, fields: Sequence[Field], target: Path) -> None:
        """Refuse what the format cannot hold, before anything is written."""
        ...

    def write_unit(self, unit: Unit, folder: Path) -> None:
        """Write a unit's files into a new folder."""
        ...

    def assemble(self, units: Sequence[Path], out: Path) -> None:
        """Put whole units together at ``out``, a file or folder that does not exist; the units stay as they are."""
        ...


def export_dataset(
    source: Path | str,
    target: Path | str,
    to: Format,
    *,
    only: Only | Literal["failed_apart"] = "all",
    min_length: int = 0,
    fps: float | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the committed episodes of a dataset in another format.

    Args:
        source: the folder that an ``EpisodeRecorder`` wrote.
        target: file (robomimic) or folder (LeRobot, Minari) to make; must not exist.
        to: the format.
        only: which episodes; ``failed_apart`` makes two datasets, the failed ones at ``<target>_failed``.
        min_length: leave out shorter episodes.
        fps: steps per second, where the dataset does not say.
        progress: told how far it is.

    Returns:
        What was made.
    """
    if to not in FORMATS:
        raise UnknownNameError("format", to, FORMATS)
    target = Path(target)
    if only == "failed_apart":
        apart = target.with_name(f"{target.stem}_failed{target.suffix}")
        if to == "minari":
            stem, _, version = target.name.rpartition("-v")
            apart = target.with_name(f"{stem}_failed-v{version}")
        halves: tuple[tuple[Only, Path], ...] = (("succeeded", target), ("failed", apart))
        made: list[Path] = []
        for half, place in halves:
            dataset = EpisodeDataset(source, only=half, min_length=min_length)
            if len(dataset):
                made.append(_export(dataset, place, to, fps, progress))
        return made
    return [_export(EpisodeDataset(source, only=only, min_length=min_length), target, to, fps, progress)]


def _export(dataset: EpisodeDataset, target: Path, to: Format, fps: float | None, progress: Progress | None) -> Path:
    if not len(dataset):
        raise DataError(
            f"{dataset.path}: no episode to export; record some, or choose others with only and min_length "
            "(--only, --min-length)"
        )
    if target.exists():
        raise ConfigError(f"{target}: already exists, and nothing is ever overwritten; choose another path")
    exporter = _make_exporter(dataset, to, fps)
    fields = _common_fields(dataset)
    exporter.check(fields, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # HDF5 answers a full disk with a broken file and a storm of messages: better to know before
    needed, free = exporter.space * sum(entry.size for entry in dataset.entries), shutil.disk_usage(target.parent).free
    if needed > free:
        raise StorageError(
            errno.ENOSPC, f"{target}: the export needs up to {needed:,} bytes, the disk has {free:,}; make room"
        )
    try:
        _assemble(dataset, target, exporter, _plan(dataset, to, exporter, fps), progress)
    except OSError as error:
        raise storage_error(target, error, "make room and start the export again: it goes on where it was") from error
    return target


def _assemble(
    dataset: EpisodeDataset, target: Path, exporter: Exporter, plan: bytes, progress: Progress | None
) -> None:
    partial = target.with_name(f"{target.name}.partial")
    _begin(partial, plan)
    done: list[Path] = []
    finished = 0
    for unit in _split(dataset, exporter.unit_bytes):
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
    put_in_place(out, target)
    shutil.rmtree(partial)


def _make_exporter(dataset: EpisodeDataset, to: Format, fps: float | None) -> Exporter:
    # each format brings its own library, which is loaded when it is asked for
    if to == "robomimic":
        from headrace.recording._robomimic import RobomimicExporter

        return RobomimicExporter(dataset)
    if to == "minari":
        from headrace.recording._minari_format import MinariExporter

        return MinariExporter(dataset)
    from headrace.recording._lerobot import LeRobotExporter

    return LeRobotExporter(dataset, fps)


def _common_fields(dataset: EpisodeDataset) -> list[Field]:
    """The fields of the episodes, which must agree."""
    first: list[Field] = []
    for number, episode in enumerate(dataset):
        fields = [episode.field(name) for name in sorted(episode.names)]
        if number == 0:
            first = fields
        elif fields != first:
            raise DataError(
                f"{dataset.path}: episode {episode.meta.episode_id} has other fields than episode "
                f"{dataset.entries[0].episode_id}; export them apart"
            )
    return first


def _plan(dataset: EpisodeDataset, to: Format, exporter: Exporter, fps: float | None) -> bytes:
    """What an export is made of; a partial one goes on only if this is the same."""
    digest = hashlib.sha256("".join(entry.sha256 for entry in dataset.entries).encode()).hexdigest()
    plan = {"to": to, "fps": fps, "unit_bytes": exporter.unit_bytes, "episodes": len(dataset), "sha256": digest}
    return json.dumps(plan).encode()


def _begin(partial: Path, plan: bytes) -> None:
    file = partial / "plan.json"
    if partial.exists() and (not file.exists() or file.read_bytes() != plan):
        # of another set of episodes, for example before more were recorded: begin again
        shutil.rmtree(partial)
    partial.mkdir(exist_ok=True)
    if not file.exists():
        write_whole(file, plan)


def _split(dataset: EpisodeDataset, unit_bytes: int) -> list[Unit]:
    units: list[Unit] = []
    held: list[Episode] = []
    size = first = step = 0
    for number, episode in enumerate(dataset):
        held.append(episode)
        size += episode.entry.size
        if size >= unit_bytes or number == len(dataset) - 1:
            units.append(Unit(index=len(units), first_episode=first, first_step=step, episodes=tuple(held)))
            first += len(held)
            step += sum(episode.meta.length for episode in held)
            held, size = [], 0
    return units
