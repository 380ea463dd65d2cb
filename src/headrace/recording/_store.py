"""The journaled store: a directory of episode files in which a crash can tear nothing.

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

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from headrace import files
from headrace.errors import ConfigError, DataError, StorageError
from headrace.files import (
    FileHash,
    append,
    claim,
    lock,
    read_json,
    storage_error,
    sync_directory,
    truncate,
    write_whole,
)
from headrace.recording._episode_file import (
    META_KINDS,
    EpisodeMeta,
    Kinds,
    check_record,
    is_count,
    is_text,
    write_episode_file,
)
from headrace.recording._fields import Array, Field
from headrace.recording._info import INFO, DatasetInfo, info_text
from headrace.recording._npz_writer import BlockBuffer

Group = Literal["episodes", "failed"]
_GROUPS: tuple[Group, ...] = ("episodes", "failed")
_SHA256 = re.compile("[0-9a-f]{64}")


class Writable(Protocol):
    """A finished episode in memory."""

    @property
    def meta(self) -> EpisodeMeta:
        """What it is."""
        ...

    @property
    def group(self) -> Group:
        """The directory it belongs to."""
        ...

    def columns(self) -> Iterable[tuple[Field, Iterable[Array]]]:
        """Its fields with their rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry(EpisodeMeta):
    """A committed episode: what it is, and the file that must be there."""

    file: str
    """Path relative to the dataset: the group's directory and the episode's file name."""
    size: int
    """Bytes of the file."""
    sha256: str

    def as_line(self) -> bytes:
        """The line of the journal, with its newline."""
        fields = {**self.as_dict(), "file": self.file, "size": self.size, "sha256": self.sha256}
        return json.dumps(fields).encode() + b"\n"

    def check(self, dataset: Path) -> None:
        """Compare the episode's file with this entry."""
        FileHash(self.size, self.sha256).check(dataset / self.file)

    @property
    def failed_apart(self) -> bool:
        """Whether the episode was put aside as failed."""
        return self.file.startswith("failed/")


_JOURNAL_KINDS: Kinds = {
    **META_KINDS,
    "file": ("a path in episodes/ or failed/", is_text),
    "size": ("a whole number from 0", is_count),
    "sha256": ("64 hexadecimal digits", lambda value: isinstance(value, str) and bool(_SHA256.fullmatch(value))),
}


def read_journal(path: Path) -> tuple[list[JournalEntry], int]:
    """Entries in order of commit, and the number of bytes that whole lines take.

    A last line without its newline, or one that is not yet JSON, is the trace of a crash and is left out. A bad line
    before others is damage.
    """
    entries: list[JournalEntry] = []
    good = 0
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}; this is not a whole dataset") from error
    for number, line in enumerate(lines[:-1], start=1):
        where = f"{path}, line {number}"
        try:
            content: object = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) - 1 and not lines[-1]:
                break
            raise DataError(f"{where}: not a journal line ({error}); the journal is damaged") from error
        entry = JournalEntry(**check_record(content, _JOURNAL_KINDS, where))
        if entry.file not in {f"{group}/{entry.file_name}" for group in _GROUPS}:
            raise DataError(f"{where}: file: expected episodes/{entry.file_name}, got {entry.file!r}")
        entries.append(entry)
        good += len(line) + 1
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
            self._lock = lock(self.path)
        else:
            self._lock = claim(self.path, "pass resume=True to go on with a dataset, or choose another path")
        try:
            (self.path / "episodes").mkdir(exist_ok=True)
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
            if json.loads(text) != read_json(file):
                raise ConfigError(
                    f"{file}: was recorded with other settings; resume with the same DatasetInfo or choose another path"
                )
        else:
            write_whole(file, text)
        if self._journal.exists():
            self.entries, whole = read_journal(self._journal)
            if whole != self._journal.stat().st_size:
                truncate(self._journal, whole)
        else:
            write_whole(self._journal, b"")
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
                    sync_directory(self.path / group)
                append(self._journal, b"".join(entry.as_line() for entry in fresh))
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
            sync_directory(self.path)
        target = folder / episode.meta.file_name
        part = target.with_name(f"{target.name}.part")
        try:
            size, digest = write_episode_file(part, episode.meta, episode.columns(), self._buffer)
            files.disk.rename(part, target)
        except BaseException:  # also Ctrl-C; raised again
            part.unlink(missing_ok=True)
            raise
        return JournalEntry(**episode.meta.as_dict(), file=f"{episode.group}/{target.name}", size=size, sha256=digest)

    def _failed(self, error: OSError) -> StorageError:
        safe = f"{len(self.entries)} committed episodes are safe. Make room, then go on with resume=True"
        return storage_error(self.path, error, safe)

    def close(self) -> None:
        """Let others write here."""
        self._lock.close()
