"""Reading episodes back: lazy, in a fixed order, nested as they were. Several recordings can be merged into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from headrace._leaves import nest
from headrace.errors import ConfigError, DataError, IdError
from headrace.files import link_or_copy, write_directory, write_whole
from headrace.recording._episode_file import EpisodeFile, EpisodeMeta
from headrace.recording._store import INFO, JournalEntry, info_text, read_info, read_journal
from headrace.recording.fields import Array, Field, Nested, first_difference

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
        """Return rows ``start:stop`` of one array; only they are read."""
        return self._file.read(name, start, stop)

    def check(self) -> None:
        """Compare every byte of its file with what was recorded."""
        self.entry.check(self._path)

    def arrays(self) -> dict[str, Nested]:
        """Return everything, nested: ``episode.arrays()["obs"]["policy"]``."""
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
        """Return the episode of that id; ``seed`` may be left out where the dataset has one seed."""
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


def merge_datasets(sources: Sequence[Path | str], target: Path | str) -> Path:
    """Make one dataset of the episodes of several; the sources stay as they are.

    Files are linked where the disk allows it, else copied. The datasets must agree in what they say of themselves and
    in their fields, and every file must be the one of its journal line. An episode (seed, id, attempt) that several
    have with equal content is taken once: a worker that died may have recorded it before. Other content is refused.

    Args:
        sources: directories that an ``EpisodeRecorder`` wrote, two or more.
        target: directory to make; appears when it is whole.
    """
    if len(sources) < 2:
        raise ConfigError(f"merge: expected two datasets or more, got {len(sources)}")
    datasets = [EpisodeDataset(source) for source in sources]
    _check_descriptions(datasets)
    _check_identities(datasets)
    filled = [dataset for dataset in datasets if len(dataset)]
    for dataset in filled[1:]:
        if different := first_difference(filled[0][0].fields, dataset[0].fields):
            name, here, there = different
            raise ConfigError(
                f"merge: {name} is {here} in {filled[0].path} and {there} in {dataset.path}; record the same fields"
            )

    def fill(folder: Path) -> None:
        (folder / "episodes").mkdir()
        lines: dict[tuple[int, int, int], bytes] = {}
        for dataset in datasets:
            for entry in dataset.entries:
                entry.check(dataset.path)
                if entry.key not in lines:
                    link_or_copy(dataset.path / entry.file, folder / entry.file)
                    lines[entry.key] = entry.as_line()
        write_whole(folder / INFO, info_text(datasets[0].info))
        write_whole(folder / "journal.jsonl", b"".join(lines.values()))

    write_directory(Path(target), fill)
    return Path(target)


def _check_descriptions(datasets: Sequence[EpisodeDataset]) -> None:
    first = datasets[0]
    for other in datasets[1:]:
        here, there = asdict(first.info), asdict(other.info)
        for name, value in here.items():
            if there[name] != value:
                raise ConfigError(
                    f"merge: {name} is {value!r} in {first.path} and {there[name]!r} in {other.path}; only recordings "
                    "of the same environment can be merged"
                )


def _check_identities(datasets: Sequence[EpisodeDataset]) -> None:
    seen: dict[tuple[int, int, int], tuple[str, Path]] = {}
    for dataset in datasets:
        for entry in dataset.entries:
            content, where = seen.setdefault(entry.key, (entry.directory_sha256, dataset.path))
            if content != entry.directory_sha256:
                raise DataError(
                    f"merge: episode {entry.episode_id} of seed {entry.seed} (attempt {entry.attempt}) is in "
                    f"{where} and, with other content, in {dataset.path}; record with different seeds"
                )
