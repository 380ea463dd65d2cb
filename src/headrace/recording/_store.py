"""The journaled store: a directory of episode files in which a crash can tear nothing.

An episode is written, synced, and only then gets its line in ``journal.jsonl``. Files without a line are leftovers of a
crash: readers ignore them and ``resume`` removes them.

```
dataset/
  dataset.json       what was recorded, from which environment
  journal.jsonl      one line per committed episode
  episodes/          seed0_ep00000012.npz …
```

What a dataset says about itself: ``dataset.json``, from which exports and replay know the environment.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
from annotated_types import Gt, Lt, Predicate
from gymnasium import spaces
from numpy.typing import NDArray

from headrace import files
from headrace.errors import ConfigError, DataError, StorageError
from headrace.files import (
    FileHash,
    Lock,
    append,
    claim,
    read_json,
    read_lines,
    read_record,
    storage_error,
    sync,
    truncate,
    write_whole,
)
from headrace.recording._episode_file import (
    BlockBuffer,
    Count,
    EpisodeMeta,
    check_archive,
    write_episode_file,
)
from headrace.recording.fields import Text
from headrace.types import StackSpec

if TYPE_CHECKING:
    from headrace.recording.running import FinishedEpisode

INFO = "dataset.json"
FORMAT = "headrace-dataset"
VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """Where the episodes of a dataset come from. Exports and replay read it; ``DatasetInfo.of(env)`` fills it in."""

    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the environment is, as ``EnvRecipe.from_json`` reads it: ``source``, and what else decides an episode."""
    fps: Annotated[float, Gt(0), Lt(math.inf)] | None = None
    """Environment steps per simulated second; LeRobot needs it."""
    instruction: Text = ""
    """The task in words, where the episodes have none of their own; the name of the task where empty."""
    robot_type: Text | None = None
    stacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Image groups that are stacks of frames: the arguments of ``StackSpec`` by observation path."""
    spaces: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """``action`` and ``observation`` as JSON, in the form that Minari writes Gymnasium spaces."""

    @classmethod
    def of(cls, env: Any, *, instruction: str = "", robot_type: str | None = None) -> DatasetInfo:
        """Describe an environment of ``headrace.make`` or ``headrace.bridge``: its recipe, rate, spaces and stacks."""
        recipe, task = getattr(env, "recipe", None), getattr(env, "task", None)
        images = cast("Mapping[str, Any]", getattr(task, "images", {}))
        return cls(
            recipe={} if recipe is None else recipe.identity(),
            fps=None if task is None else round(1 / task.dt, 6),
            instruction=instruction,
            robot_type=robot_type,
            stacks={f"obs/{name}": asdict(image.stack) for name, image in images.items() if image.frames > 1},
            spaces={
                "action": space_json(env.single_action_space),
                "observation": space_json(env.single_observation_space),
            },
        )

    @property
    def source(self) -> str:
        """Task name, as ``headrace.make`` takes it, or ``gym:ID`` of a bridged environment; empty where not said."""
        return str(self.recipe.get("source", ""))

    @property
    def arguments(self) -> dict[str, Any]:
        """Of ``headrace.make``, beside the task's name: whatever else the recipe says."""
        return {name: value for name, value in self.recipe.items() if name != "source"}

    def stack(self, name: str) -> StackSpec | None:
        """Return how the frames of an image group are stacked; None for single images."""
        known = self.stacks.get(name)
        return None if known is None else StackSpec(**known)


def info_text(info: DatasetInfo) -> str:
    """Return the content of ``dataset.json``; what could not be read back is refused."""
    said = asdict(info)
    try:
        read_record(DatasetInfo, said, "DatasetInfo", strict=True)
    except (DataError, TypeError, ValueError) as error:
        raise ConfigError(f"{error}; describe the environment in what JSON can say") from error
    return json.dumps({"format": FORMAT, "version": VERSION, **said}, indent=1) + "\n"


def read_info(path: Path) -> DatasetInfo:
    """Return the ``dataset.json`` of a dataset."""
    file = path / INFO
    if not file.exists():
        raise DataError(f"{path}: no {INFO}; expected the directory that EpisodeRecorder wrote")
    content = read_json(file)
    found = (content.pop("format", None), content.pop("version", None))
    if found != (FORMAT, VERSION):
        advice = "export it with headrace 0.2" if found == (FORMAT, 1) else "update headrace"
        raise DataError(f"{file}: expected format {FORMAT} of version {VERSION}; {advice}")
    info = read_record(DatasetInfo, content, str(file), strict=True)
    try:
        for name in info.stacks:
            info.stack(name)
    except (TypeError, ConfigError) as error:
        raise DataError(f"{file}: stacks: {error}; the file is damaged") from error
    return info


def space_json(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a Gymnasium space as Minari writes it."""
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "subspaces": {name: space_json(part) for name, part in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "subspaces": [space_json(part) for part in cast("Sequence[Any]", space.spaces)]}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "dtype": str(space.dtype), "start": int(space.start), "n": int(space.n)}
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = np.asarray(space.nvec), np.asarray(space.start)
        return {"type": "MultiDiscrete", "dtype": str(space.dtype), "nvec": nvec.tolist(), "start": start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        shape = list(space.shape)
        return {"type": "MultiBinary", "n": shape if len(shape) > 1 else shape[0]}
    if isinstance(space, spaces.Text):
        return {
            "type": "Text",
            "max_length": space.max_length,
            "min_length": space.min_length,
            "charset": "".join(sorted(space.character_set)),
        }
    if isinstance(space, spaces.Box):
        bounds = {"low": _bounds(np.asarray(space.low)), "high": _bounds(np.asarray(space.high))}
        return {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
    raise ConfigError(
        f"spaces: expected one that Minari knows, got {type(space).__name__}; record without DatasetInfo.of"
    )


def _bounds(values: NDArray[Any]) -> Any:
    """Bounds as JSON can say them: one number where all are the same, infinities as texts."""
    flat = [number if math.isfinite(number) else str(number) for number in values.reshape(-1).tolist()]
    return flat[0] if len(set(flat)) == 1 else np.array(flat, object).reshape(values.shape).tolist()


def whole_space(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return a space of ``dataset.json`` with every bound spelled out, as Minari reads it."""
    if space["type"] == "Dict":
        return {"type": "Dict", "subspaces": {name: whole_space(part) for name, part in space["subspaces"].items()}}
    if space["type"] == "Tuple":
        return {"type": "Tuple", "subspaces": [whole_space(part) for part in space["subspaces"]]}
    if space["type"] != "Box":
        return dict(space)
    shape, dtype = tuple(space["shape"]), np.dtype(space["dtype"])
    bounds = {name: np.broadcast_to(np.array(space[name], dtype), shape).tolist() for name in ("low", "high")}
    return {**space, **bounds}


_FOLDER = "episodes"
_GROUPS = (_FOLDER, "failed")
"""Directories of episode files; 0.2 could keep failed ones apart."""


def _is_hash(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry(EpisodeMeta):
    """A committed episode: what it is, and the file that must be there."""

    file: str
    """Path relative to the dataset: the group's directory and the episode's file name."""
    size: Count
    """Bytes of the file."""
    directory_sha256: Annotated[str, Predicate(_is_hash)]
    """Of the archive's directory, which has the size and the CRC-32 of every member."""

    def as_line(self) -> bytes:
        """Return the line of the journal, with its newline."""
        return json.dumps(self.as_dict()).encode() + b"\n"

    def check(self, dataset: Path) -> None:
        """Compare the episode's file with this entry."""
        path = dataset / self.file
        FileHash(self.size, "").check(path, content=False)
        if check_archive(path) != self.directory_sha256:
            raise DataError(f"{path}: is not the episode that the journal lists; restore it from a copy")


def read_journal(path: Path) -> tuple[list[JournalEntry], int]:
    """Entries in order of commit, and the number of bytes that whole lines take.

    A last line without its newline, or one that is not yet JSON, is the trace of a crash and is left out. A bad line
    before others is damage.
    """
    entries: list[JournalEntry] = []
    good = 0
    if links := [group for group in _GROUPS if (path.parent / group).is_symlink()]:
        raise DataError(f"{path.parent / links[0]}: cannot be read: symbolic links are not followed")
    lines = read_lines(path)
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            content: object = json.loads(line)
        except (ValueError, RecursionError) as error:
            if next(lines, None) is None:
                break
            raise DataError(f"{where}: not a journal line ({error}); the journal is damaged") from error
        entry = read_record(JournalEntry, content, where, strict=True)
        if entry.file not in {f"{group}/{entry.file_name}" for group in _GROUPS}:
            raise DataError(f"{where}: file: expected episodes/{entry.file_name}, got {entry.file!r}")
        entries.append(entry)
        good += len(line)
    return entries, good


class EpisodeStore:
    """The writing side of a dataset directory, for one process at a time: a lock that dies with it holds others out.

    Args:
        path: the dataset directory; made if absent.
        info: where the episodes come from; must be the same when resuming.
        resume: go on after the committed episodes. Without it a directory with anything in it is refused.
    """

    def __init__(self, path: Path | str, info: DatasetInfo, *, resume: bool = False) -> None:
        self.path = Path(path)
        self._journal = self.path / "journal.jsonl"
        self.entries: list[JournalEntry] = []
        self._keys: set[tuple[int, int, int]] = set()
        self._buffer = BlockBuffer()
        if resume and self.path.is_dir():
            self._lock = Lock(self.path)
        else:
            self._lock = claim(self.path, "pass resume=True to go on with a dataset, or choose another path")
        try:
            (self.path / _FOLDER).mkdir(exist_ok=True)
            self._open(info)
        except OSError as error:
            self._lock.close()
            raise error if isinstance(error, StorageError) else storage_error(self.path, error) from error
        except BaseException:  # also Ctrl-C; raised again
            self._lock.close()
            raise

    def _open(self, info: DatasetInfo) -> None:
        text = info_text(info)
        file = self.path / INFO
        if file.exists():
            if read_json(file) != json.loads(text):
                raise ConfigError(
                    f"{file}: was recorded with other settings; resume with the same DatasetInfo or choose another path"
                )
        else:
            write_whole(file, text)
        if not self._journal.exists():
            write_whole(self._journal, b"")
        self.entries, whole = read_journal(self._journal)
        if whole != self._journal.stat().st_size:
            truncate(self._journal, whole)
        for entry in self.entries:
            entry.check(self.path)
        self._keys = {entry.key for entry in self.entries}
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        known = {entry.file for entry in self.entries}
        for group in _GROUPS:
            folder = self.path / group
            for file in [*folder.glob("seed*_ep*.npz"), *folder.glob("seed*_ep*.npz.part")]:
                if f"{group}/{file.name}" not in known:
                    file.unlink()

    def __contains__(self, key: tuple[int, int, int]) -> bool:
        """Return whether the episode (seed, episode id, attempt) is committed."""
        return key in self._keys

    def commit(self, episodes: Sequence[FinishedEpisode]) -> None:
        """Write episodes, in order, and return when the disk has them and their lines in the journal.

        An episode that is already there is left as it is. If the disk fails, what was whole before stays committed, the
        rest leaves no trace, and StorageError is raised.
        """
        self._lock.owner.check(self.path, "record into another directory")
        written: list[tuple[int, JournalEntry]] = []
        fresh: list[JournalEntry] = []
        failure: OSError | None = None
        try:
            try:
                for episode in episodes:
                    if episode.meta.key not in self._keys:
                        written.append(self._write(episode))
                        self._keys.add(episode.meta.key)
            except OSError as error:
                failure = error
            # only now: the first sync brings most of what the others wait for to the disk
            for handle, entry in written:
                files.disk.sync(handle)
                fresh.append(entry)
        except OSError as error:
            failure = error
        finally:
            for handle, _ in written:
                os.close(handle)
            self._remove([entry for _, entry in written[len(fresh) :]])
        try:
            if fresh:
                sync(self.path / _FOLDER)
                append(self._journal, b"".join(entry.as_line() for entry in fresh))
                self.entries += fresh
        except OSError as error:
            failure = error
            self._remove(fresh)
        if failure is not None:
            raise self._make_storage_error(failure) from failure

    def _write(self, episode: FinishedEpisode) -> tuple[int, JournalEntry]:
        """Write an episode; returns the open file, which is not synced yet, and its line."""
        file = self.path / _FOLDER / episode.meta.file_name
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            size, digest = write_episode_file(handle, episode.meta, episode.columns(), self._buffer)
        except BaseException:  # also Ctrl-C; raised again
            os.close(handle)
            file.unlink(missing_ok=True)
            raise
        name = f"{_FOLDER}/{file.name}"
        return handle, JournalEntry(**episode.meta.as_dict(), file=name, size=size, directory_sha256=digest)

    def _remove(self, entries: Iterable[JournalEntry]) -> None:
        """Take back what was written and has no line."""
        for entry in entries:
            self._keys.discard(entry.key)
            (self.path / entry.file).unlink(missing_ok=True)

    def _make_storage_error(self, error: OSError) -> StorageError:
        safe = f"{len(self.entries)} committed episodes are safe. Make room, then go on with resume=True"
        return storage_error(self.path, error, safe)

    def close(self) -> None:
        """Let others write here."""
        self._lock.close()
