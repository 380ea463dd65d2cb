"""The journal: one JSON line per committed episode. What has no line does not exist."""

from __future__ import annotations

import json
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


def as_line(entry: JournalEntry) -> bytes:
    """The line of an entry, with its newline."""
    return json.dumps(entry.as_line()).encode() + b"\n"
