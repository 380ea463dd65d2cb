"""Putting datasets together: several recordings of the same environment become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from headrace.errors import ConfigError, DataError
from headrace.files import link_or_copy, write_directory, write_whole
from headrace.recording._dataset import EpisodeDataset
from headrace.recording._fields import first_difference
from headrace.recording._info import INFO, info_text


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
            identity = entry.identity(dataset.path)
            content, where = seen.setdefault(entry.key, (identity, dataset.path))
            if content != identity:
                raise DataError(
                    f"merge: episode {entry.episode_id} of seed {entry.seed} (attempt {entry.attempt}) is in "
                    f"{where} and, with other content, in {dataset.path}; record with different seeds"
                )
