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
from headrace.errors import DataError
from headrace.files import FileHash, Manifest, write_all
from headrace.replay._memory import COMMIT, Memory
from headrace.replay._spec import Json, StoreSpec, ViewSpec, to_json

MANIFEST = "manifest.json"
MAIN = "main"
"""The sampler that every store has."""
VERSION = 2
_BLOCK = 1 << 20
_FORMAT = "headrace-replay"


class CommitRecord:
    """Two copies of the counters, each with a sequence number and a checksum; the newer whole one counts.

    Layout of a half, int64: sequence, counts (N), trajectories (N), crc32 of what precedes.
    """

    def __init__(self, memory: Memory, num_envs: int) -> None:
        self._size = 2 * num_envs + 2
        self.block = memory.allocate(COMMIT, 2 * self._size * 8)
        self._halves = self.block.view(np.int64).reshape(2, self._size)
        self._num_envs = num_envs
        self._latest = np.zeros(self._size, np.int64)
        self.refresh()

    @property
    def sequence(self) -> int:
        """Writes so far."""
        return int(self._latest[0])

    def write(self, counts: Int64s, trajectories: Int64s) -> None:
        """Make the present counters the state that a reopened store has."""
        half = np.empty(self._size, np.int64)
        half[0] = self._latest[0] + 1
        half[1 : 1 + self._num_envs] = counts
        half[1 + self._num_envs : -1] = trajectories
        half[-1] = zlib.crc32(half[:-1].tobytes())
        self._halves[half[0] % 2] = half
        self._latest = half

    def refresh(self) -> None:
        """Look for a newer record, which another process may have written."""
        for half in self._halves.copy():
            if half[0] > self._latest[0] and int(half[-1]) == zlib.crc32(half[:-1].tobytes()):
                self._latest = half

    def read(self) -> tuple[Int64s, Int64s]:
        """Counts and trajectories of the last complete write; zeros where there was none."""
        n = self._num_envs
        return self._latest[1 : 1 + n].copy(), self._latest[1 + n : -1].copy()


def write_manifest(
    path: Path, spec: StoreSpec, views: Mapping[str, ViewSpec], files: Mapping[str, FileHash] | None = None
) -> None:
    """Describe a store and the samplers that read it: live if it lists no files, else a checkpoint."""
    about = cast("dict[str, Json]", to_json({"store": spec, "views": views}))
    Manifest(format=_FORMAT, version=VERSION, about=about, files=files or {}).write(path / MANIFEST)


def read_manifest(path: Path, *, live: bool) -> tuple[StoreSpec, dict[str, ViewSpec], Manifest]:
    """Read and check a manifest: the store, the samplers that read it, and the saved files (none for a live store)."""
    manifest = Manifest.read(path / MANIFEST, format=_FORMAT, version=VERSION)
    if live == bool(manifest.files):
        found, use = ("a checkpoint, not a live store", "load") if live else ("a live store, not a checkpoint", "open")
        raise DataError(f"{path}: this is {found}; use ReplayBuffer.{use}")
    views = cast("dict[str, Json]", manifest.about.get("views", {}))
    if MAIN not in views:
        raise DataError(f"{path / MANIFEST}: expected a sampler named {MAIN!r}, got {sorted(views)}")
    spec = StoreSpec.from_json(cast("Json", manifest.about.get("store")))
    return spec, {name: ViewSpec.from_json(view) for name, view in views.items()}, manifest


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
