"""The journaled store: a folder of episode files in which a crash can tear nothing.

An episode is written beside its place, synced, renamed, and only then gets its line in ``journal.jsonl``. Files without
a line are leftovers of a crash: readers ignore them and ``resume`` removes them.

```
dataset/
  dataset.json       what was recorded, from which environment
  journal.jsonl      one line per committed episode
  episodes/          seed0_ep00000012.npz …
  failed/            the same, where failed episodes are kept apart
```
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from headrace.errors import ConfigError, DataError, LifecycleError, StorageError
from headrace.recording._block_file import BlockBuffer
from headrace.recording._episode_file import EpisodeMeta, file_digest, write_episode_file
from headrace.recording._fields import Array, Field
from headrace.recording._journal import JournalEntry, append_lines, read_journal, sync_folder, truncate

FORMAT = "headrace-dataset"
VERSION = 1
Group = Literal["episodes", "failed"]
_GROUPS: tuple[Group, ...] = ("episodes", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """Where the episodes of a dataset come from. Exports and replay read it."""

    env_name: str = ""
    """Task name, as ``headrace.make`` takes it."""
    env_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of ``headrace.make``; anything that JSON can say."""
    fps: float | None = None
    """Environment steps per simulated second; LeRobot needs it."""
    instruction: str = ""
    """The task in words, for policies that read; the name of the task where empty."""
    robot_type: str | None = None


class Writable(Protocol):
    """A finished episode in memory."""

    @property
    def meta(self) -> EpisodeMeta:
        """What it is."""
        ...

    @property
    def group(self) -> Group:
        """The folder it belongs to."""
        ...

    def columns(self) -> Iterable[tuple[Field, Iterable[Array]]]:
        """Its fields with their rows."""
        ...


def read_info(path: Path) -> DatasetInfo:
    """The ``dataset.json`` of a store."""
    file = path / "dataset.json"
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise DataError(f"{path}: no dataset.json; expected the folder that EpisodeRecorder wrote") from None
    except ValueError as error:
        raise DataError(f"{file}: not JSON ({error})") from error
    if content.pop("format", None) != FORMAT or content.pop("version", None) != VERSION:
        raise DataError(f"{file}: expected format {FORMAT} {VERSION}; update headrace")
    return DatasetInfo(**content)


class EpisodeStore:
    """The writing side of a dataset folder. One process at a time; a lock that dies with its process holds others out.

    Args:
        path: the dataset folder; made if absent.
        info: where the episodes come from; must be the same when resuming.
        resume: go on after the committed episodes. Without it a folder with anything in it is refused.
    """

    def __init__(self, path: Path | str, info: DatasetInfo, *, resume: bool = False) -> None:
        self.path = Path(path)
        self._journal = self.path / "journal.jsonl"
        self.entries: list[JournalEntry] = []
        self._keys: set[tuple[int, int, int]] = set()
        self._buffer = BlockBuffer()
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path}: expected a folder, got a file; choose another path")
        if not resume and self.path.exists() and any(self.path.iterdir()):
            raise ConfigError(
                f"{self.path}: already has files, and a dataset is never overwritten; pass resume=True to go on, "
                "or choose another path"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise StorageError(error.errno, f"{self.path}: cannot be written: {error}") from error
        try:
            self._take_lock()
            (self.path / "episodes").mkdir(exist_ok=True)
            self._open(info)
        except BaseException:  # also Ctrl-C; raised again
            self._lock.close()
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LifecycleError(
                f"{self.path}: another recorder is writing here; close it or choose another path"
            ) from None

    def _open(self, info: DatasetInfo) -> None:
        wanted = {"format": FORMAT, "version": VERSION, **asdict(info), "env_args": dict(info.env_args)}
        text = json.dumps(wanted, indent=1)
        file = self.path / "dataset.json"
        if file.exists():
            if json.loads(text) != json.loads(file.read_text()):
                raise ConfigError(
                    f"{file}: was recorded with other settings; resume with the same DatasetInfo or choose another path"
                )
        else:
            write_atomically(file, text.encode())
        if self._journal.exists():
            self.entries, whole = read_journal(self._journal)
            if whole != self._journal.stat().st_size:
                truncate(self._journal, whole)
        else:
            self._journal.touch()
            sync_folder(self.path)
        for entry in self.entries:
            check_entry(self.path, entry)
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
        """Whether the episode (seed, episode id, attempt) is committed."""
        return key in self._keys

    def commit(self, episodes: Sequence[Writable]) -> None:
        """Write episodes, in order, and return when the disk has them and their lines in the journal.

        An episode that is already there is left as it is. If the disk fails, what was whole before stays committed, the
        rest leaves no trace, and StorageError is raised.
        """
        fresh: list[JournalEntry] = []
        failure: OSError | None = None
        for episode in episodes:
            if episode.meta.key in self._keys:
                continue
            try:
                fresh.append(self._write(episode))
            except OSError as error:
                failure = error
                break
            self._keys.add(episode.meta.key)
        try:
            if fresh:
                for group in sorted({entry.file.split("/")[0] for entry in fresh}):
                    sync_folder(self.path / group)
                append_lines(self._journal, fresh)
                self.entries += fresh
        except OSError as error:
            failure = error
            for entry in fresh:
                self._keys.discard(entry.key)
                (self.path / entry.file).unlink(missing_ok=True)
        if failure is not None:
            raise self._failed(failure) from failure

    def _write(self, episode: Writable) -> JournalEntry:
        folder = self.path / episode.group
        if not folder.exists():
            folder.mkdir()
            sync_folder(self.path)
        target = folder / episode.meta.file_name
        part = target.with_name(f"{target.name}.part")
        try:
            size, digest = write_episode_file(part, episode.meta, episode.columns(), self._buffer)
            part.rename(target)
        except BaseException:  # also Ctrl-C; raised again
            part.unlink(missing_ok=True)
            raise
        return JournalEntry(**episode.meta.as_dict(), file=f"{episode.group}/{target.name}", size=size, sha256=digest)

    def _failed(self, error: OSError) -> StorageError:
        reasons = {
            errno.ENOSPC: "the disk is full",
            errno.EFBIG: "the file would pass the size limit",
            errno.EROFS: "the disk is read-only",
        }
        reason = reasons.get(error.errno or 0, str(error))
        return StorageError(
            error.errno,
            f"{self.path}: {reason}; {len(self.entries)} committed episodes are safe. "
            "Make room, then go on with resume=True",
        )

    def close(self) -> None:
        """Let others write here."""
        self._lock.close()


def check_entry(path: Path, entry: JournalEntry) -> None:
    """Compare a committed episode's file with its journal line."""
    file = path / entry.file
    if not file.exists():
        raise DataError(f"{file}: in the journal, but not on disk; restore it or remove its line from journal.jsonl")
    size = file.stat().st_size
    if size != entry.size:
        raise DataError(f"{file}: expected {entry.size} bytes, got {size}; the file is damaged")
    digest = file_digest(file)
    if digest != entry.sha256:
        raise DataError(f"{file}: expected SHA-256 {entry.sha256[:12]}…, got {digest[:12]}…; the file is damaged")


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a small file in one go: written beside it, synced, renamed."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    sync_folder(path.parent)
