"""Reading episodes back: lazy, in a fixed order, nested as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from headrace._leaves import nest
from headrace.errors import ConfigError, DataError, IdError
from headrace.recording._episode_file import EpisodeFile, EpisodeMeta
from headrace.recording._fields import Array, Field, Nested
from headrace.recording._info import read_info
from headrace.recording._store import JournalEntry, read_journal

Only = Literal["all", "succeeded", "failed"]


class Episode:
    """One committed episode. Arrays are read when asked for; the caller owns them.

    ``obs/…`` and ``states`` have T+1 rows, from the first to the true last; the others have T.
    """

    def __init__(self, path: Path, entry: JournalEntry) -> None:
        self.entry = entry
        self._path = path
        self._opened: EpisodeFile | None = None

    @property
    def meta(self) -> EpisodeMeta:
        """Identity, length and outcome; known without opening the file."""
        return self.entry

    @property
    def names(self) -> list[str]:
        """Paths of its arrays, such as ``obs/policy``."""
        return self._file.names

    def field(self, name: str) -> Field:
        """Dtype and row shape of an array."""
        return self._file.field(name)

    @property
    def fields(self) -> list[Field]:
        """Dtype and row shape of all arrays, in order of name."""
        return self._file.fields

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows ``start:stop`` of one array; only they are read."""
        return self._file.read(name, start, stop)

    def arrays(self) -> dict[str, Nested]:
        """Everything, nested: ``episode.arrays()["obs"]["policy"]``."""
        return nest({name: self.read(name) for name in self.names})

    @property
    def _file(self) -> EpisodeFile:
        if self._opened is None:
            file = EpisodeFile(self._path / self.entry.file)
            if file.meta.key != self.entry.key or file.meta.length != self.entry.length:
                raise DataError(
                    f"{file.path}: holds episode {file.meta.key} of {file.meta.length} steps, its journal line says "
                    f"{self.entry.key} of {self.entry.length}; run 'headrace record verify'"
                )
            self._opened = file
        return self._opened


class EpisodeDataset:
    """The committed episodes of a dataset directory, in order of seed, episode id and attempt.

    Reading needs no lock and may go on while a recorder writes; it sees what was committed when it was opened.

    Args:
        path: the directory that an ``EpisodeRecorder`` wrote.
        only: ``succeeded`` or ``failed`` episodes.
        min_length: leave out shorter ones.
    """

    def __init__(self, path: Path | str, *, only: Only = "all", min_length: int = 0) -> None:
        self.path = Path(path)
        self.info = read_info(self.path)
        if only not in ("all", "succeeded", "failed"):
            raise ConfigError(f"only: expected 'all', 'succeeded' or 'failed', got {only!r}")
        entries, _ = read_journal(self.path / "journal.jsonl")
        entries = [entry for entry in entries if entry.length >= min_length]
        if only != "all":
            unknown = [entry for entry in entries if entry.success is None]
            if unknown:
                raise ConfigError(
                    f"only={only!r}: episode {unknown[0].episode_id} does not say whether it succeeded; its task "
                    "has no success measure. Use only='all'"
                )
            entries = [entry for entry in entries if entry.success == (only == "succeeded")]
        self.entries = sorted(entries, key=lambda entry: entry.key)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Episode:
        if not -len(self) <= index < len(self):
            raise IdError(f"episode {index}: the dataset has {len(self)}; choose 0 to {len(self) - 1}")
        return Episode(self.path, self.entries[index])

    def __iter__(self) -> Iterator[Episode]:
        for entry in self.entries:
            yield Episode(self.path, entry)

    def find(self, episode_id: int, seed: int | None = None, attempt: int = 0) -> Episode:
        """The episode of that id; ``seed`` may be left out where the dataset has one seed."""
        found = [
            entry
            for entry in self.entries
            if entry.episode_id == episode_id and entry.attempt == attempt and seed in (None, entry.seed)
        ]
        if not found:
            raise IdError(f"episode id {episode_id}: not in the dataset; 'headrace record info' lists what is")
        if len(found) > 1:
            seeds = ", ".join(str(entry.seed) for entry in found)
            raise IdError(f"episode id {episode_id}: recorded under several seeds ({seeds}); say which")
        return Episode(self.path, found[0])

    @property
    def steps(self) -> int:
        """Steps of all episodes."""
        return sum(entry.length for entry in self.entries)
