"""Datasets of version 0.1, whose journal has hashes of whole files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from counting_env import CountingEnv

from headrace.errors import ConfigError, DataError
from headrace.files import hash_file
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg, merge_datasets, verify_dataset


def record(path: Path, steps: int, *, resume: bool = False) -> Path:
    cfg = RecorderCfg(fields=("obs", "actions", "rewards", "flags", "states"))
    with EpisodeRecorder(path, cfg, DatasetInfo(fps=20.0), resume=resume) as recorder:
        env = CountingEnv(3, [recorder])
        env.reset()
        for _ in range(steps):
            env.step()
    return path


def make_old(path: Path) -> Path:
    """Write what version 0.1 would have written for the same episodes."""
    info, journal = path / "dataset.json", path / "journal.jsonl"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"version": 1}, indent=1) + "\n")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines:
        del line["directory_sha256"]
        line["sha256"] = hash_file(path / line["file"])
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("version", ["0.1", "now"])
def test_a_dataset_is_verified_and_a_changed_byte_found(tmp_path: Path, version: str) -> None:
    path = record(tmp_path / "d", 30)
    if version == "0.1":
        make_old(path)
    assert verify_dataset(path).problems == ()
    damage(path / EpisodeDataset(path).entries[1].file)
    (problem,) = verify_dataset(path).problems
    assert "checksum" in str(problem)
    with pytest.raises(DataError, match="checksum"):
        record(path, 30, resume=True)


def test_recording_goes_on_in_an_old_dataset_which_old_readers_then_refuse_by_its_version(tmp_path: Path) -> None:
    path = make_old(record(tmp_path / "d", 20))
    before = [entry.key for entry in EpisodeDataset(path).entries]
    record(path, 60, resume=True)
    dataset = EpisodeDataset(path)
    assert {*before} < {entry.key for entry in dataset.entries}
    assert {entry.of_file for entry in dataset.entries} == {True, False}
    assert verify_dataset(path).problems == ()
    assert json.loads((path / "dataset.json").read_text())["version"] == 2


def test_a_version_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path = record(tmp_path / "d", 20)
    info = path / "dataset.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"version": 3}))
    with pytest.raises(DataError, match="update headrace"):
        EpisodeDataset(path)
    with pytest.raises(ConfigError, match="other settings"):
        record(path, 20, resume=True)


def test_equal_episodes_of_both_versions_are_merged_once_and_different_ones_refused(tmp_path: Path) -> None:
    new = record(tmp_path / "new", 30)
    old = make_old(Path(shutil.copytree(new, tmp_path / "old")))
    merged = EpisodeDataset(merge_datasets([old, new], tmp_path / "both"))
    assert len(merged) == len(EpisodeDataset(new))
    assert verify_dataset(tmp_path / "both").problems == ()
    first, second = EpisodeDataset(old).entries[:2]
    assert first.identity(old) == EpisodeDataset(new).entries[0].identity(new) != second.identity(old)
