"""What a directory needs besides the blocks themselves: the manifest, the commit record, checksums.

A store on disk is consistent after every ``extend``, also if the process is killed in the middle of one: the ring has
a slot that no committed transition refers to, freed side rows rest for one write, and the counters that make a write
count are in a record with two halves, written in turn. This holds for the death of the process; to survive the loss of
power as well, call ``flush``.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from headrace._kernels.gather import Bytes, Int64s
from headrace.errors import ConfigError, DataError
from headrace.replay._memory import Memory
from headrace.replay._spec import Json, StoreSpec

MANIFEST = "manifest.json"
VERSION = 1
_BLOCK = 1 << 20
_FRAMES = "frames"


class CommitRecord:
    """Two copies of the counters, each with a sequence number and a checksum; the newer whole one counts.

    Layout of a half, int64: sequence, draws, counts (N), trajectories (N), crc32 of what precedes.
    """

    def __init__(self, memory: Memory, num_envs: int) -> None:
        self._size = 2 * num_envs + 3
        self.block = memory.allocate("commit", 2 * self._size * 8)
        self._halves = self.block.view(np.int64).reshape(2, self._size)
        self._num_envs = num_envs
        self._sequence = max((int(half[0]) for half in self._halves if _whole(half)), default=0)

    def write(self, counts: Int64s, trajectories: Int64s, draws: int) -> None:
        """Make the present counters the state that a reopened store has."""
        self._sequence += 1
        half = np.empty(self._size, np.int64)
        half[0], half[1] = self._sequence, draws
        half[2 : 2 + self._num_envs] = counts
        half[2 + self._num_envs : -1] = trajectories
        half[-1] = zlib.crc32(half[:-1].tobytes())
        self._halves[self._sequence % 2] = half

    def read(self) -> tuple[Int64s, Int64s, int]:
        """Counts, trajectories and draws of the last complete write; zeros where there was none."""
        half = self._halves[self._sequence % 2]
        n = self._num_envs
        return half[2 : 2 + n].copy(), half[2 + n : -1].copy(), int(half[1])


@dataclass(frozen=True, slots=True)
class SavedFile:
    """Size and checksum of one saved block."""

    size: int
    crc32: int


def _whole(half: Int64s) -> bool:
    return int(half[0]) > 0 and int(half[-1]) == zlib.crc32(half[:-1].tobytes())


def create_directory(path: Path) -> None:
    """Make a new directory; one with content is refused, so that nothing is overwritten by accident."""
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ConfigError(f"{path}: expected an empty or new directory; open it with ReplayBuffer.open, or remove it")


def write_manifest(path: Path, spec: StoreSpec, files: Mapping[str, SavedFile]) -> None:
    """Write the manifest, whole or not at all."""
    content: dict[str, Json] = {
        "format": "headrace-replay",
        "version": VERSION,
        "store": spec.to_json(),
        "files": {name: {"size": file.size, "crc32": file.crc32} for name, file in sorted(files.items())},
    }
    content["digest"] = _digest(content)
    partial = path / (MANIFEST + ".partial")
    with partial.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path / MANIFEST)


def read_manifest(path: Path) -> tuple[StoreSpec, dict[str, SavedFile]]:
    """Read and check a manifest: the store's description, and the saved files (none for a live store)."""
    manifest = path / MANIFEST
    if not manifest.exists():
        raise DataError(f"{path}: expected {MANIFEST}; this is not a replay store, or its creation was interrupted")
    try:
        content = cast("Json", json.loads(manifest.read_text()))
    except ValueError as error:
        raise DataError(f"{manifest}: expected JSON; {error}") from error
    if not isinstance(content, dict) or content.get("format") != "headrace-replay":
        raise DataError(f"{manifest}: expected format 'headrace-replay'; this is not a replay store")
    if content.get("version") != VERSION:
        raise DataError(f"{manifest}: expected version {VERSION}, got {content.get('version')}")
    digest = content.pop("digest", None)
    if digest != _digest(content):
        raise DataError(f"{manifest}: the checksum does not match; the file was changed or is damaged")
    files = cast("dict[str, dict[str, int]]", content["files"])
    return StoreSpec.from_json(content["store"]), {name: SavedFile(**entry) for name, entry in files.items()}


def save_block(path: Path, name: str, block: Bytes) -> SavedFile:
    """Write one block as a sparse file, leaving holes for runs of zeros, and sync it."""
    crc = 0
    with (path / (name + ".bin")).open("wb") as file:
        for start in range(0, block.nbytes, _BLOCK):
            piece = block[start : start + _BLOCK]
            crc = zlib.crc32(piece.data, crc)
            if piece.any():
                file.seek(start)
                file.write(piece.data)
        file.truncate(block.nbytes)
        file.flush()
        os.fsync(file.fileno())
    return SavedFile(block.nbytes, crc)


def check_files(path: Path, files: Mapping[str, SavedFile], *, frames: bool) -> None:
    """Check that saved files are there and whole; the contents of frame files only if ``frames``."""
    for name, expected in files.items():
        file = path / (name + ".bin")
        if not file.exists():
            raise DataError(f"{file}: the checkpoint lists this file, but it is missing")
        size = file.stat().st_size
        if size != expected.size:
            raise DataError(f"{file}: expected {expected.size} bytes, got {size}; the file was cut or changed")
        if not frames and name.startswith(_FRAMES):
            continue
        crc = 0
        with file.open("rb") as content:
            while piece := content.read(_BLOCK):
                crc = zlib.crc32(piece, crc)
        if crc != expected.crc32:
            raise DataError(f"{file}: the checksum does not match; the file is damaged, restore it from a copy")


def _digest(content: dict[str, Json]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
