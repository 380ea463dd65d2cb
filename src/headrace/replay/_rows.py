"""Row spaces: fixed-size rows of bytes, numbered from 0, in shards that never move."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from headrace._kernels import gather as kernels
from headrace._kernels.gather import Bools, Bytes, Int64s
from headrace.replay._memory import Memory, ReadOnlyMemory

SHARD_BYTES = 1 << 28
"""Largest shard, unless one row is larger."""


class MappedRows:
    """Numbered rows of one array in mapped memory; owns its shards.

    ``source`` is always (N, …) with row ``index[i]`` meant for ``rows[i]``. See
    :class:`headrace.replay._compressed.CompressedRows` for rows that are kept smaller.
    """

    def __init__(self, memory: Memory, name: str, row_bytes: int, rows: int) -> None:
        """Reserve ``rows`` rows; more can be had later with :meth:`reserve`."""
        self.row_bytes = row_bytes
        largest = max(SHARD_BYTES // row_bytes, 1).bit_length() - 1
        self._shift = min(max(rows - 1, 0).bit_length(), largest)
        self._memory = memory
        self._name = name
        self._shards: list[Bytes] = []
        self._space = (np.empty(0, np.int64), self._shift, row_bytes)
        self.reserve(rows)

    def reserve(self, rows: int) -> None:
        """Make row numbers below ``rows`` usable. Shards that an earlier process wrote are mapped again."""
        while len(self._shards) << self._shift < rows:
            name = f"{self._name}.{len(self._shards):04d}"
            self._shards.append(self._memory.allocate(name, self.row_bytes << self._shift))
            addresses = np.array([shard.ctypes.data for shard in self._shards], np.int64)
            self._space = (addresses, self._shift, self.row_bytes)

    def write(self, rows: Int64s, source: Tensor, index: Int64s, offset: int = 0) -> None:
        """Copy ``source[index[i]]`` to ``rows[i]``, from byte ``offset`` of the source's row on."""
        source, stride = _rowwise(source)
        kernels.scatter(self._space, rows, (source.data_ptr() + offset, stride, index))

    def differ(self, rows: Int64s, outer: int, source: Tensor, index: Int64s, out: Bools) -> None:
        """Set ``out[i]`` where rows (n, F) are not ``source[index[i]]``, laid out as :meth:`read` does, bit for bit.

        Entries that are set already are not looked at.
        """
        source, stride = _rowwise(source)
        kernels.differ(self._space, rows, outer, (source.data_ptr(), stride, index), out)

    def move(self, to: Int64s, rows: Int64s) -> None:
        """Copy ``rows[i]`` to ``to[i]``."""
        kernels.move(self._space, to, rows)

    def read(self, rows: Int64s, outer: int, out: Bytes) -> None:
        """Copy rows (B, F) to ``out`` as (B, outer, F, piece); row -1 reads as zeros."""
        if isinstance(self._memory, ReadOnlyMemory):
            rows = self._mapped(rows)
        kernels.gather(self._space, rows, outer, out)

    def _mapped(self, rows: Int64s) -> Int64s:
        """Rows that another process writes; those beyond its files come of a torn read, which shows later."""
        try:
            self.reserve(int(rows.max(initial=0)) + 1)
        except FileNotFoundError:
            return np.minimum(rows, (len(self._shards) << self._shift) - 1)
        return rows

    def nbytes(self, rows: int, /) -> int:
        """Bytes that the first ``rows`` rows take."""
        return rows * self.row_bytes

    def blocks(self) -> dict[str, Bytes]:
        """The shards by block name, for saving."""
        return {f"{self._name}.{i:04d}": shard for i, shard in enumerate(self._shards)}


def _rowwise(source: Tensor) -> tuple[Tensor, int]:
    """A tensor whose rows are contiguous, the same one where they are already, and the bytes from row to row."""
    if not source.is_contiguous() and source.shape[0] and not source[0].is_contiguous():
        source = source.contiguous()
    return source, source.stride(0) * source.element_size()
