"""One episode, one file: an uncompressed ``.npz`` whose bytes depend on the episode alone.

Every member is a plain ``.npy`` array named by its field; ``episode.json`` says what the episode is. ``numpy.load``
reads it without us. Dates inside the archive are fixed and nothing of the machine, the slot or the time of day gets in,
so equal episodes give equal bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headrace.errors import DataError
from headrace.recording._block_file import BlockBuffer, BlockFile
from headrace.recording._fields import Array, Field
from headrace.recording._zip_writer import Member, zip_pieces

FORMAT = "headrace-episode"
VERSION = 1
_HEADER = "episode.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeMeta:
    """What an episode is, apart from its arrays."""

    episode_id: int
    seed: int
    attempt: int
    """0 unless the same (seed, episode id) was finished before in the same run."""
    length: int
    """Steps, T."""
    success: bool | None
    diverged: bool
    episode_return: float

    @property
    def key(self) -> tuple[int, int, int]:
        """The identity: (seed, episode id, attempt)."""
        return self.seed, self.episode_id, self.attempt

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as they are written; quicker than ``dataclasses.asdict``."""
        return {name: getattr(self, name) for name in _META_NAMES}

    @property
    def file_name(self) -> str:
        """Name of the episode's file."""
        attempt = f"_try{self.attempt}" if self.attempt else ""
        return f"seed{self.seed}_ep{self.episode_id:08d}{attempt}.npz"


def write_episode_file(
    path: Path, meta: EpisodeMeta, columns: Iterable[tuple[Field, Iterable[Array]]], buffer: BlockBuffer
) -> tuple[int, str]:
    """Write an episode and wait until the disk has it.

    Args:
        path: a file that does not exist yet.
        meta: what the episode is.
        columns: each field with its rows in order, in contiguous pieces of any length.
        buffer: borrowed while it is written.

    Returns:
        Size in bytes and SHA-256 of the file.
    """
    header = {"format": FORMAT, "version": VERSION, **meta.as_dict()}
    members = [Member(_HEADER, [json.dumps(header).encode()])]
    for field, rows in columns:
        shape = (field.rows(meta.length), *field.shape)
        pieces: list[bytes | memoryview] = [_array_header(field.dtype, shape)]
        for piece in rows:
            if piece.nbytes:
                # bool, float16 and the like have no simple buffer format: bytes do
                pieces.append(piece.reshape(-1).view(np.uint8).data)
        missing = shape[0] * field.row_bytes - sum(map(len, pieces[1:]))
        if missing:
            raise DataError(f"{field.name}: expected rows for the whole episode, {missing} bytes are missing")
        members.append(Member(f"{field.name}.npy", pieces))
    with BlockFile(path, buffer) as file:
        for piece in zip_pieces(members):
            file.write(piece)
    return file.size, file.sha256()


@functools.lru_cache(maxsize=256)
def _array_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    content = io.BytesIO()
    # of the array headers that numpy knows, version 1.0 reads everywhere
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(content, description)
    return content.getvalue()


@dataclass(frozen=True, slots=True)
class _Stored:
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


_META_NAMES = tuple(field.name for field in dataclasses.fields(EpisodeMeta))


class EpisodeFile:
    """An episode on disk, read lazily: opening reads the directory of the archive, an array is read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stored: dict[str, _Stored] = {}
        try:
            with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
                self.meta = _read_meta(archive.read(_HEADER), path)
                for info in archive.infolist():
                    if info.filename.endswith(".npy"):
                        self._stored[info.filename[:-4]] = _locate(raw, info)
        except (zipfile.BadZipFile, KeyError, struct.error, EOFError) as error:
            raise DataError(f"{path}: not an episode file, or a damaged one ({error})") from error

    @property
    def names(self) -> list[str]:
        """Paths of the arrays."""
        return list(self._stored)

    def field(self, name: str) -> Field:
        """Dtype and row shape of an array."""
        stored = self._find(name)
        rows = stored.shape[0] - self.meta.length
        if rows not in (0, 1):
            raise DataError(
                f"{self.path}: {name} has {stored.shape[0]} rows, expected {self.meta.length} or one more; "
                "record the episode again"
            )
        extra = "" if rows == 0 else ("first" if name == "states" else "last")
        return Field(name=name, dtype=stored.dtype, shape=stored.shape[1:], extra=extra)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows ``start:stop`` of an array; the caller owns the memory."""
        stored = self._find(name)
        first, last, _ = slice(start, stop).indices(stored.shape[0])
        out = np.empty((max(0, last - first), *stored.shape[1:]), stored.dtype)
        if out.nbytes:
            with self.path.open("rb") as raw:
                raw.seek(stored.offset + first * (out.nbytes // out.shape[0]))
                if raw.readinto(out.reshape(-1).view(np.uint8).data) != out.nbytes:
                    raise DataError(f"{self.path}: {name} ends too early; run 'headrace record verify'")
        return out

    def _find(self, name: str) -> _Stored:
        try:
            return self._stored[name]
        except KeyError:
            raise DataError(f"{self.path}: no array {name!r}; it has {', '.join(self._stored)}") from None


def _read_meta(text: bytes, path: Path) -> EpisodeMeta:
    header = json.loads(text)
    if header.pop("format", None) != FORMAT or header.pop("version", None) != VERSION:
        raise DataError(f"{path}: expected an episode of format {FORMAT} {VERSION}; update headrace")
    return EpisodeMeta(**header)


def _locate(raw: BinaryIO, info: zipfile.ZipInfo) -> _Stored:
    # the archive's directory knows where a member begins; the lengths of its name and extra field stand there
    raw.seek(info.header_offset + 26)
    name, extra = struct.unpack("<HH", raw.read(4))
    raw.seek(info.header_offset + 30 + name + extra)
    version = np.lib.format.read_magic(raw)
    if version != (1, 0):
        raise DataError(f"{info.filename}: expected a .npy header of version 1.0, got {version}")
    shape, _, dtype = np.lib.format.read_array_header_1_0(raw)
    return _Stored(raw.tell(), dtype, shape)
