"""What a directory needs besides the blocks themselves: the manifest, the commit record, checksums.

A store on disk is consistent after every ``extend``, also if the process is killed in the middle of one: the ring has
a slot that no committed transition refers to, freed side rows rest for one write, and the counters that make a write
count are in a record with two halves, written in turn. This holds for the death of the process; to survive the loss of
power as well, call ``flush``.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np

from headrace._kernels.gather import Bytes, Int64s
from headrace.files import FileHash, Manifest, write_all
from headrace.replay._memory import COMMIT, Memory
from headrace.replay._spec import Json, StoreSpec

MANIFEST = "manifest.json"
VERSION = 1
_BLOCK = 1 << 20
_FORMAT = "headrace-replay"


class CommitRecord:
    """Two copies of the counters, each with a sequence number and a checksum; the newer whole one counts.

    Layout of a half, int64: sequence, draws, counts (N), trajectories (N), crc32 of what precedes.
    """

    def __init__(self, memory: Memory, num_envs: int) -> None:
        self._size = 2 * num_envs + 3
        self.block = memory.allocate(COMMIT, 2 * self._size * 8)
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


def _whole(half: Int64s) -> bool:
    return int(half[0]) > 0 and int(half[-1]) == zlib.crc32(half[:-1].tobytes())


def write_manifest(path: Path, spec: StoreSpec, files: Mapping[str, FileHash]) -> None:
    """Describe a store: live if it lists no files, else a checkpoint."""
    Manifest(format=_FORMAT, version=VERSION, about=spec.to_json(), files=files).write(path / MANIFEST)


def read_manifest(path: Path) -> tuple[StoreSpec, Manifest]:
    """Read and check a manifest: the store's description, and the saved files (none for a live store)."""
    manifest = Manifest.read(path / MANIFEST, format=_FORMAT, version=VERSION)
    return StoreSpec.from_json(cast("Json", manifest.about)), manifest


def save_block(path: Path, name: str, block: Bytes) -> FileHash:
    """Write one block as a sparse file, leaving holes for runs of zeros; the caller syncs it."""
    digest = hashlib.sha256()
    handle = os.open(path / (name + ".bin"), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for start in range(0, block.nbytes, _BLOCK):
            piece = block[start : start + _BLOCK]
            digest.update(piece.data)
            if piece.any():
                os.lseek(handle, start, os.SEEK_SET)
                write_all(handle, piece.data)
        os.ftruncate(handle, block.nbytes)
    finally:
        os.close(handle)
    return FileHash(block.nbytes, digest.hexdigest())


def holds_frames(name: str) -> bool:
    """Whether a saved file has frames: large, and checked only on request."""
    return name.startswith("frames")
