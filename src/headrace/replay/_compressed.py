"""Rows kept compressed, one by one and without loss: smaller memory for slower samples.

It pays for pictures with large even areas (Atari, rendered scenes: 3 to 10 times smaller) where memory is the limit;
sampling has to unpack every frame. A frame that does not shrink is kept as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError, DataError, require_extra
from headrace.replay._blocks import Allocator, Bytes, Int64s
from headrace.replay._spec import Codec
from headrace.replay.row_space import Bools

Packed: TypeAlias = "bytes | memoryview"

OBJECT_BYTES = 33 + 8
"""A Python bytes object, and the list's pointer to it."""


class CompressedRowSpace:
    """Own rows as separate byte strings; the interface is that of ``RowSpace``."""

    def __init__(self, codec: Codec, row_bytes: int, memory: Allocator, name: str) -> None:
        self.row_bytes = row_bytes
        self._name = name
        self._pack, self._unpack = _codec(codec, row_bytes)
        self._rows: list[Packed] = []
        self._total = 0
        blob, sizes = memory.stored(f"{name}.packed"), memory.stored(f"{name}.sizes")
        if blob is not None and sizes is not None:
            self._restore(blob, sizes.view(np.int64))

    def reserve(self, rows: int) -> None:
        """Make row numbers below ``rows`` usable; rows that were never written read as zeros."""
        self._rows.extend(b"" for _ in range(rows - len(self._rows)))

    def write(self, rows: Int64s, source: Tensor, index: Int64s, offset: int = 0) -> None:
        """Pack and keep ``source[index[i]]`` as ``rows[i]``, from byte ``offset`` on."""
        for row, at in zip(rows.tolist(), index.tolist(), strict=True):
            raw = _raw(source[at])[offset : offset + self.row_bytes]
            packed = self._pack(raw)
            self._set(row, packed if len(packed) < self.row_bytes else raw)

    def differ(self, rows: Int64s, outer: int, source: Tensor, index: Int64s, out: Bools) -> None:
        """Set ``out[i]`` where rows (n, F) are not ``source[index[i]]``; entries set already are not looked at."""
        unpacked = np.empty(rows.shape[1] * self.row_bytes, np.uint8)
        for i in (~out).nonzero()[0].tolist():
            self.read(rows[i : i + 1], outer, unpacked)
            out[i] = unpacked.tobytes() != _raw(source[int(index[i])])

    def move(self, to: Int64s, rows: Int64s) -> None:
        """Share the packed bytes of ``rows[i]`` with ``to[i]``; they are never changed in place."""
        for target, row in zip(to.tolist(), rows.tolist(), strict=True):
            self._set(target, self._rows[row])

    def read(self, rows: Int64s, outer: int, out: Bytes) -> None:
        """Unpack rows (B, F) into ``out``, laid out as (B, outer, F, piece)."""
        count, frames = rows.shape
        pieces = out.reshape(count, outer, frames, self.row_bytes // outer)
        for b in range(count):
            for f, row in enumerate(rows[b].tolist()):
                frame = np.frombuffer(self._get(row), np.uint8) if row >= 0 else np.zeros(self.row_bytes, np.uint8)
                pieces[b, :, f] = frame.reshape(outer, -1)

    def nbytes(self, _rows: int, /) -> int:
        """Return bytes of everything packed so far, with what Python adds; rows to come are not known."""
        return self._total + OBJECT_BYTES * len(self._rows)

    def blocks(self) -> dict[str, Bytes]:
        """Return all packed rows in one block, and their sizes."""
        sizes = np.array([len(row) for row in self._rows], np.int64)
        blob = np.frombuffer(b"".join(self._rows), np.uint8)
        return {f"{self._name}.packed": blob, f"{self._name}.sizes": sizes.view(np.uint8)}

    def _restore(self, blob: Bytes, sizes: Int64s) -> None:
        if int(sizes.sum()) != blob.nbytes:
            raise DataError(f"{self._name}.packed: expected {int(sizes.sum())} bytes, got {blob.nbytes}")
        content, at = blob.data, 0
        for size in sizes.tolist():
            self._rows.append(content[at : at + size])
            at += size
        self._total = at

    def _set(self, row: int, packed: Packed) -> None:
        self._total += len(packed) - len(self._rows[row])
        self._rows[row] = packed

    def _get(self, row: int) -> bytes:
        packed = self._rows[row]
        if len(packed) == self.row_bytes:
            return bytes(packed)
        return self._unpack(packed) if len(packed) else bytes(self.row_bytes)


def _raw(frame: Tensor) -> bytes:
    return frame.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _codec(codec: Codec, row_bytes: int) -> tuple[Callable[[bytes], bytes], Callable[[Packed], bytes]]:
    """Functions that pack and unpack one row."""
    if codec == "lz4":
        block = require_extra("lz4.block", extra="compress", purpose="codec='lz4'")
        compress = cast("Callable[..., bytes]", block.compress)
        decompress = cast("Callable[..., bytes]", block.decompress)
        return (
            lambda raw: compress(raw, store_size=False),
            lambda packed: decompress(packed, uncompressed_size=row_bytes),
        )
    if codec == "zstd":
        zstandard = require_extra("zstandard", extra="compress", purpose="codec='zstd'")
        packer, unpacker = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
        return (
            cast("Callable[[bytes], bytes]", packer.compress),
            lambda packed: cast("bytes", unpacker.decompress(packed, max_output_size=row_bytes)),
        )
    raise ConfigError(f"codec: expected 'lz4', 'zstd' or None, got {codec!r}")
