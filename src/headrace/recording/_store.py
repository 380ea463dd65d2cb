"""The journaled store: a directory of episode files in which a crash can tear nothing.

An episode is written, synced, and only then gets its line in ``journal.jsonl``. Files without a line are leftovers of a
crash: readers ignore them and ``resume`` removes them.

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
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace import files
from headrace.errors import ConfigError, DataError, StorageError
from headrace.files import FileHash, Lock, append, claim, read_json, storage_error, sync, truncate, write_whole
from headrace.recording._episode_file import (
    META_KINDS,
    EpisodeMeta,
    Kinds,
    check_record,
    is_count,
    is_text,
    write_episode_file,
)
from headrace.recording._info import INFO, VERSIONS, DatasetInfo, info_text
from headrace.recording._npz_writer import BlockBuffer, check_archive

if TYPE_CHECKING:
    from headrace.recording.running import FinishedEpisode

Group = Literal["episodes", "failed"]
_GROUPS: tuple[Group, ...] = ("episodes", "failed")
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry(EpisodeMeta):
    """A committed episode: what it is, and the file that must be there."""

    file: str
    """Path relative to the dataset: the group's directory and the episode's file name."""
    size: int
    """Bytes of the file."""
    sha256: str
    """Of the archive's directory, which has the size and the CRC-32 of every member; of the whole file in datasets of
    version 0.1."""
    of_file: bool = False
    """Whether ``sha256`` is of the whole file."""

    def as_line(self) -> bytes:
        """Return the line of the journal, with its newline."""
        fields = {**self.as_dict(), "file": self.file, "size": self.size, _hash_key(self.of_file): self.sha256}
        return json.dumps(fields).encode() + b"\n"

    def check(self, dataset: Path) -> None:
        """Compare the episode's file with this entry."""
        path = dataset / self.file
        FileHash(self.size, self.sha256).check(path, content=self.of_file)
        if not self.of_file and check_archive(path) != self.sha256:
            raise DataError(f"{path}: is not the episode that the journal lists; restore it from a copy")

    def identity(self, dataset: Path) -> str:
        """Return a hash of the content, which entries of all versions can be compared by."""
        return check_archive(dataset / self.file) if self.of_file else self.sha256

    @property
    def failed_apart(self) -> bool:
        """Whether the episode was put aside as failed."""
        return self.file.startswith("failed/")


_JOURNAL_KINDS: Kinds = {
    **META_KINDS,
    "file": ("a path in episodes/ or failed/", is_text),
    "size": ("a whole number from 0", is_count),
}


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and bool(_SHA256.fullmatch(value))


def _hash_key(of_file: bool) -> str:
    return "sha256" if of_file else "directory_sha256"


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
        of_file = isinstance(content, dict) and "sha256" in content
        key = _hash_key(of_file)
        record = check_record(content, {**_JOURNAL_KINDS, key: ("64 hexadecimal digits", _is_hash)}, where)
        entry = JournalEntry(sha256=record.pop(key), of_file=of_file, **record)
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
        self._folders: set[Group] = set()
        self._buffer = BlockBuffer()
        if resume and self.path.is_dir():
            self._lock = Lock(self.path)
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
            there, wanted = read_json(file), json.loads(text)
            version = there.get("version")
            if there | {"version": wanted["version"]} != wanted or version not in VERSIONS:
                raise ConfigError(
                    f"{file}: was recorded with other settings; resume with the same DatasetInfo or choose another path"
                )
            if version != wanted["version"]:
                write_whole(file, text)
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
        """Return whether the episode (seed, episode id, attempt) is committed."""
        return key in self._keys

    def commit(self, episodes: Sequence[FinishedEpisode]) -> None:
        """Write episodes, in order, and return when the disk has them and their lines in the journal.

        An episode that is already there is left as it is. If the disk fails, what was whole before stays committed, the
        rest leaves no trace, and StorageError is raised.
        """
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
                for group in sorted({entry.file.split("/")[0] for entry in fresh}):
                    sync(self.path / group)
                append(self._journal, b"".join(entry.as_line() for entry in fresh))
                self.entries += fresh
        except OSError as error:
            failure = error
            self._remove(fresh)
        if failure is not None:
            raise self._failed(failure) from failure

    def _write(self, episode: FinishedEpisode) -> tuple[int, JournalEntry]:
        """Write an episode; returns the open file, which is not synced yet, and its line."""
        folder = self.path / episode.group
        if episode.group not in self._folders:
            folder.mkdir(exist_ok=True)
            sync(self.path)
            self._folders.add(episode.group)
        file = folder / episode.meta.file_name
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            size, digest = write_episode_file(handle, episode.meta, episode.columns(), self._buffer)
        except BaseException:  # also Ctrl-C; raised again
            os.close(handle)
            file.unlink(missing_ok=True)
            raise
        name = f"{episode.group}/{file.name}"
        return handle, JournalEntry(**episode.meta.as_dict(), file=name, size=size, sha256=digest)

    def _remove(self, entries: Iterable[JournalEntry]) -> None:
        """Take back what was written and has no line."""
        for entry in entries:
            self._keys.discard(entry.key)
            (self.path / entry.file).unlink(missing_ok=True)

    def _failed(self, error: OSError) -> StorageError:
        safe = f"{len(self.entries)} committed episodes are safe. Make room, then go on with resume=True"
        return storage_error(self.path, error, safe)

    def close(self) -> None:
        """Let others write here."""
        self._lock.close()
