"""The journal: one JSON line per committed episode. What has no line does not exist."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import DataError
from headrace.recording._episode_file import EpisodeMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry(EpisodeMeta):
    """A committed episode: what it is, and the file that must be there."""

    file: str
    """Path relative to the dataset."""
    size: int
    """Bytes of the file."""
    sha256: str

    def as_line(self) -> dict[str, Any]:
        """The fields by name, as the journal has them."""
        return {**self.as_dict(), "file": self.file, "size": self.size, "sha256": self.sha256}

    @property
    def failed_apart(self) -> bool:
        """Whether the episode was put aside as failed."""
        return self.file.startswith("failed/")


def read_journal(path: Path) -> tuple[list[JournalEntry], int]:
    """Entries in order of commit, and the number of bytes that whole lines take.

    A last line without its newline, or one that is not yet JSON, is the trace of a crash and is left out. A bad line
    before others is damage.
    """
    entries: list[JournalEntry] = []
    good = 0
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entries.append(JournalEntry(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number == len(lines) - 1 and not lines[-1]:
                break
            raise DataError(f"{path}, line {number}: not a journal line ({error}); the journal is damaged") from error
        good += len(line) + 1
    return entries, good


def append_lines(path: Path, entries: Sequence[JournalEntry]) -> None:
    """Append entries and wait until the disk has them; on failure the journal is as before."""
    text = b"".join(json.dumps(entry.as_line()).encode() + b"\n" for entry in entries)
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            if file.write(text) != len(text):
                raise OSError(f"{path}: the disk took only a part of the line")
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def truncate(path: Path, size: int) -> None:
    """Cut a torn last line."""
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until renames in a folder are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
