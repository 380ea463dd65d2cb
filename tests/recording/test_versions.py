"""Versions of recorded datasets, and whether their content is what was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from counting_env import CountingEnv

from headrace.errors import ConfigError, DataError
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg, verify_dataset


def record(path: Path, steps: int, *, resume: bool = False) -> Path:
    cfg = RecorderCfg(fields=("obs", "actions", "rewards", "flags", "states"))
    with EpisodeRecorder(path, cfg, DatasetInfo(fps=20.0), resume=resume) as recorder:
        env = CountingEnv(3, [recorder])
        env.reset()
        for _ in range(steps):
            env.step()
    return path


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_dataset_is_verified_and_a_changed_byte_found(tmp_path: Path) -> None:
    path = record(tmp_path / "d", 30)
    assert verify_dataset(path).problems == ()
    damage(path / EpisodeDataset(path).entries[1].file)
    (problem,) = verify_dataset(path).problems
    assert "checksum" in str(problem)
    with pytest.raises(DataError, match="checksum"):
        record(path, 30, resume=True)


@pytest.mark.parametrize(("version", "advice"), [(1, "export it with headrace 0.2"), (3, "update headrace")])
def test_a_version_that_is_not_known_is_refused(tmp_path: Path, version: int, advice: str) -> None:
    path = record(tmp_path / "d", 20)
    info = path / "dataset.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"version": version}))
    with pytest.raises(DataError, match=advice):
        EpisodeDataset(path)
    with pytest.raises(ConfigError, match="other settings"):
        record(path, 20, resume=True)
