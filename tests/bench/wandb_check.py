"""The genuine Weights & Biases, offline: ``make test-wandb``, in an environment of its own."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BLOCK = 32_768
TRAIN = """
import sys
import headrace
from headrace.learning import PPOCfg
headrace.train(
    "cartpole", num_envs=4, threads=1, overrides={"episode_length": 20}, iterations=int(sys.argv[2]),
    ppo=PPOCfg(steps=32, epochs=1, minibatches=1, hidden=(8,)), run=headrace.RunCfg(output=sys.argv[1], log=("wandb",)),
)
"""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def records(file: Path) -> Iterator[bytes]:
    """The whole records of a file in LevelDB's log format, whose last one may be cut off."""
    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := BLOCK - place % BLOCK) < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        if not kind or place + 7 + size > len(data):
            return
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def written(output: Path) -> tuple[list[dict[str, str]], list[list[str]]]:
    """What the file of an offline run holds: the rows of its history, and the names of the files of its artifacts."""
    from wandb.proto import wandb_internal_pb2

    rows: list[dict[str, str]] = []
    artifacts: list[list[str]] = []
    for file in output.glob("wandb/offline-run-*/run-*.wandb"):
        for data in records(file):
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                rows.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
            if kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
                artifacts.append([entry.path for entry in record.request.log_artifact.artifact.manifest.contents])
            if kind == "artifact":
                artifacts.append([entry.path for entry in record.artifact.manifest.contents])
    return rows, artifacts


def test_an_offline_run_has_curves_bundle_and_checkpoint(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", TRAIN, str(tmp_path / "run"), "3"], check=True)
    rows, artifacts = written(tmp_path / "run")
    assert [row["_step"] for row in rows] == ["1", "2", "3"]
    assert all("Train/mean_reward" in row for row in rows)
    assert {"training.json", "last.pt"} <= {name for names in artifacts for name in names}


def test_what_was_logged_is_readable_after_a_kill(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", TRAIN, str(output), "100000"]) as training:
        try:
            limit = time.monotonic() + 60
            while time.monotonic() < limit and training.poll() is None and len(written(output)[0]) <= 5:
                time.sleep(0.2)
        finally:
            training.kill()
    assert len(written(output)[0]) > 5
