"""Row spaces: fixed-size rows of bytes in shards that never move, and the kernels that copy and compare them.

A *row space* is a list of shards of equal size, each holding ``2 ** shift`` rows of ``row_bytes`` bytes; row ``r`` is
in shard ``r >> shift``. Shards are known by their addresses (int64), so the same kernels serve anonymous memory, files
and copy-on-write checkpoints, and the space can grow without moving. The caller keeps the shards alive and the row
numbers in range: kernels do not check.

Copies go through the C library's ``memcpy``, which is what bounds their speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.core import types as _types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from headrace._kernels.compiled import helper, inline, kernel, run
from headrace.errors import DataError
from headrace.replay._blocks import Allocator, Bytes, Int64s, ReadOnlyAllocator

Bools: TypeAlias = NDArray[np.bool_]
Space: TypeAlias = tuple[Int64s, int, int]
"""A row space: addresses of its shards, ``shift``, ``row_bytes``."""
Source: TypeAlias = tuple[int, int, Int64s]
"""Rows somewhere else: address of the first, bytes from one to the next, which of them are meant."""

ZERO_ROW = -1
"""A row number that reads as zeros."""
SHARD_BYTES = 1 << 28
"""Largest shard, unless one row is larger."""

_PREFETCHED = 1024
"""Bytes of the next large sample that are fetched early: the processor notices by itself how it goes on."""
_READ_SHARE = 1 << 19
WRITE_SHARE = 1 << 21
"""The fewest bytes for a thread: waking one for less costs more than it saves, and much more on a busy machine. Writes
come in step with an environment that has work for every core, so they stay on one thread for longer."""

memcpy = cast(
    "Callable[[int, int, int], int]",
    _types.ExternalFunction("memcpy", _types.intp(_types.intp, _types.intp, _types.intp)),
)
memcmp = cast(
    "Callable[[int, int, int], int]",
    _types.ExternalFunction("memcmp", _types.int32(_types.intp, _types.intp, _types.intp)),
)
_memset = cast(
    "Callable[[int, int, int], int]",
    _types.ExternalFunction("memset", _types.intp(_types.intp, _types.int32, _types.intp)),
)

_PIECES = 4
"""Parts of a gather for each thread, so that the call does not wait for one that wakes up late."""


def _fetch(_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch")
        flags = [ir.Constant(number, flag) for flag in (0, 2, 1)]  # to read; into the second level; data
        builder.call(function, [builder.inttoptr(args[0], pointer), *flags])
        return context.get_dummy_value()

    return _types.void(address), generate


_prefetch = cast("Callable[[int], None]", intrinsic(_fetch))
"""Brings a cache line near, and does nothing where the address is not mapped."""


@inline
def _address(space: Space, row: int) -> int:
    shards, shift, row_bytes = space
    return shards[row >> shift] + (row & ((1 << shift) - 1)) * row_bytes


@inline
def _gather_sample(space: Space, rows: Int64s, sample: int, outer: int, out: int, scratch: Bytes) -> None:
    """Write the rows of one sample; ``out`` is the address of its first byte."""
    _, shift, row_bytes = space
    frames = rows.shape[1]
    if outer == 1:
        f = 0
        while f < frames:
            row = rows[sample, f]
            if row < 0:
                _memset(out + f * row_bytes, 0, row_bytes)
                f += 1
                continue
            # frames that lie one after another are one copy
            run = 1
            while f + run < frames and rows[sample, f + run] == row + run and (row + run) >> shift == row >> shift:
                run += 1
            memcpy(out + f * row_bytes, _address(space, row), run * row_bytes)
            f += run
        return
    # interleave: read whole frames into scratch, which stays in cache, then write the output front to back
    inner = row_bytes // outer
    base = scratch.ctypes.data
    for f in range(frames):
        row = rows[sample, f]
        if row < 0:
            _memset(base + f * row_bytes, 0, row_bytes)
        else:
            memcpy(base + f * row_bytes, _address(space, row), row_bytes)
    mixed = scratch[frames * row_bytes :]
    to = 0
    for a in range(outer):
        for f in range(frames):
            start = f * row_bytes + a * inner
            for i in range(inner):
                mixed[to] = scratch[start + i]
                to += 1
    memcpy(out, base + frames * row_bytes, frames * row_bytes)


@kernel()
def _gather(start: int, stop: int, space: Space, rows: Int64s, outer: int, out: Bytes) -> None:
    size = rows.shape[1] * space[2]
    base = out.ctypes.data
    scratch = np.empty(1 if outer == 1 else 2 * size, dtype=np.uint8)
    early = _PREFETCHED if size > 4 * _PREFETCHED else 0
    for b in range(start, stop):
        ahead = rows[min(b + 1, stop - 1), 0]
        for at in range(0, early if ahead >= 0 else 0, 64):
            _prefetch(_address(space, ahead) + at)
        _gather_sample(space, rows, b, outer, base + b * size, scratch)


def gather(space: Space, rows: Int64s, outer: int, out: Bytes) -> None:
    """Copy rows (B, F) into ``out``, uint8 (B · F · row_bytes,), which the caller owns.

    ``outer`` splits every frame into that many equal pieces; the output is laid out as (B, outer, F, piece), so that
    frames can be concatenated along an inner axis without a second pass. ``outer == 1`` is (B, F, frame).
    ``ZERO_ROW`` reads as zeros.
    """
    size = rows.shape[1] * space[2]
    run(_gather, len(rows), space, rows, outer, out, min_rows=_READ_SHARE // size + 1, pieces=_PIECES)


@kernel()
def _scatter(start: int, stop: int, space: Space, rows: Int64s, source: Source) -> None:
    first, stride, index = source
    for i in range(start, stop):
        memcpy(_address(space, rows[i]), first + index[i] * stride, space[2])


def scatter(space: Space, rows: Int64s, source: Source) -> None:
    """Write row ``rows[i]`` from row i of the source; rows are distinct, memory is borrowed."""
    run(_scatter, len(rows), space, rows, source, min_rows=WRITE_SHARE // space[2] + 1)


@helper
def _words_differ(ours: Bytes, theirs: Bytes) -> bool:
    """Return whether four frames, one after another, are not the interleaved ones: a word is a byte of each."""
    size = theirs.shape[0] // 4
    first, second, third, fourth = ours[:size], ours[size : 2 * size], ours[2 * size : 3 * size], ours[3 * size :]
    words, found = theirs.view(np.uint32), np.uint32(0)
    for p in range(size):
        word = np.uint32(first[p]) | np.uint32(second[p]) << np.uint32(8)
        word |= np.uint32(third[p]) << np.uint32(16) | np.uint32(fourth[p]) << np.uint32(24)
        found |= word ^ words[p]
    return found != 0


@helper
def _pieces_differ(ours: Bytes, theirs: Bytes, frames: int, outer: int) -> bool:
    """Return whether frames of ``outer`` pieces, one after another, are not the interleaved ones."""
    inner, size = theirs.shape[0] // (frames * outer), theirs.shape[0] // frames
    found = np.uint8(0)
    for f in range(frames):
        frame = ours[f * size : (f + 1) * size]
        if inner == 3:
            # colors, unrolled by hand: three times as fast as the general loop
            for a in range(outer):
                at, to = 3 * a, 3 * (a * frames + f)
                found |= (frame[at] ^ theirs[to]) | (frame[at + 1] ^ theirs[to + 1]) | (frame[at + 2] ^ theirs[to + 2])
            continue
        for a in range(outer):
            for i in range(inner):
                found |= frame[a * inner + i] ^ theirs[(a * frames + f) * inner + i]
    return found != 0


@inline
def _sample_differs(space: Space, rows: Int64s, sample: int, outer: int, here: int, scratch: Bytes) -> bool:
    frames, row_bytes = rows.shape[1], space[2]
    plain = outer == 1
    for f in range(frames):
        plain = plain and rows[sample, f] >= 0
    if not plain:
        ours, theirs = scratch[: frames * row_bytes], scratch[frames * row_bytes : 2 * frames * row_bytes]
        _gather_sample(space, rows, sample, 1, ours.ctypes.data, scratch)
        memcpy(theirs.ctypes.data, here, frames * row_bytes)
        if frames == 4 and outer == row_bytes:
            return _words_differ(ours, theirs)
        return _pieces_differ(ours, theirs, frames, outer)
    # the newest frame first: where anything changed, it did
    for f in range(frames - 1, -1, -1):
        if memcmp(_address(space, rows[sample, f]), here + f * row_bytes, row_bytes) != 0:
            return True
    return False


@kernel()
def _differ(start: int, stop: int, space: Space, rows: Int64s, outer: int, source: Source, out: Bools) -> None:
    first, stride, index = source
    scratch = np.empty(2 * rows.shape[1] * space[2], dtype=np.uint8)
    for i in range(start, stop):
        if not out[i]:
            out[i] = _sample_differs(space, rows, i, outer, first + index[i] * stride, scratch)


def differ(space: Space, rows: Int64s, outer: int, source: Source, out: Bools) -> None:
    """Set ``out[i]`` where rows (n, F) are not, bit for bit, the F frames that row i of the source has.

    The source is laid out as :func:`gather` writes: (outer, F, piece). Entries of ``out`` that are set already are left
    alone and not compared, so that several leaves can be compared in turn.
    """
    few = WRITE_SHARE // (rows.shape[1] * space[2]) + 1
    run(_differ, len(rows), space, rows, outer, source, out, min_rows=few)


@kernel()
def _rows_differ(start: int, stop: int, first: Source, second: Source, nbytes: int, out: Bools) -> None:
    one, one_stride, ones = first
    other, other_stride, others = second
    for i in range(start, stop):
        if not out[i]:
            out[i] = memcmp(one + ones[i] * one_stride, other + others[i] * other_stride, nbytes) != 0


def rows_differ(first: Source, second: Source, nbytes: int, out: Bools) -> None:
    """Set ``out[i]`` where ``nbytes`` bytes of row i of either source are not the same."""
    run(_rows_differ, len(out), first, second, nbytes, out, min_rows=_READ_SHARE // nbytes + 1)


@kernel()
def _shifts_differ(
    start: int, stop: int, first: Source, second: Source, outer: int, frames: int, piece: int, out: Bools
) -> None:
    one, one_stride, ones = first
    other, other_stride, others = second
    size = outer * frames * piece
    scratch = np.empty(2 * size, dtype=np.uint8)
    earlier, later = scratch[:size], scratch[size:]
    for i in range(start, stop):
        before, after = one + ones[i] * one_stride, other + others[i] * other_stride
        if outer == 1:
            out[i] = memcmp(before + piece, after, (frames - 1) * piece) != 0
            continue
        memcpy(earlier.ctypes.data, before, size)
        memcpy(later.ctypes.data, after, size)
        found = np.uint8(0)
        for a in range(outer):
            at = a * frames * piece
            for b in range(at, at + (frames - 1) * piece):
                found |= earlier[b + piece] ^ later[b]
        out[i] = found != 0


def shifts_differ(
    outer: int, frames: int, first: tuple[Tensor, Int64s], second: tuple[Tensor, Int64s], out: Bools
) -> None:
    """Set ``out[i]`` unless frames 0 … K−2 of stack i of ``second`` are frames 1 … K−1 of stack i of ``first``.

    Stacks are laid out as (outer, K, piece).
    """
    (one, ones), (other, others) = first, second
    one, one_stride = _rowwise(one)
    other, other_stride = _rowwise(other)
    sources = (one.data_ptr(), one_stride, ones), (other.data_ptr(), other_stride, others)
    piece = one[0].numel() * one.element_size() // (outer * frames)
    few = WRITE_SHARE // (outer * frames * piece) + 1
    run(_shifts_differ, len(out), *sources, outer, frames, piece, out, min_rows=few)


@kernel()
def move(space: Space, to: Int64s, rows: Int64s) -> None:
    """Copy row ``rows[i]`` to row ``to[i]`` of the same space; no row may be on both sides."""
    for i in range(rows.shape[0]):
        memcpy(_address(space, to[i]), _address(space, rows[i]), space[2])


class RowSpace:
    """Numbered rows of one array in mapped memory; owns its shards.

    ``source`` is always (N, …) with row ``index[i]`` meant for ``rows[i]``. See
    :class:`headrace.replay._compressed.CompressedRowSpace` for rows that are kept smaller.
    """

    def __init__(self, memory: Allocator, name: str, row_bytes: int, rows: int) -> None:
        """Reserve ``rows`` rows; more can be had later with :meth:`reserve`."""
        self.row_bytes = row_bytes
        largest = max(SHARD_BYTES // row_bytes, 1).bit_length() - 1
        self.shift = min(max(rows - 1, 0).bit_length(), largest)
        self._memory = memory
        self._name = name
        self._shards: list[Bytes] = []
        self.addresses = np.empty(0, np.int64)
        """Of the shards."""
        self.reserve(rows)

    def reserve(self, rows: int) -> None:
        """Make row numbers below ``rows`` usable. Shards that an earlier process wrote are mapped again."""
        while len(self._shards) << self.shift < rows:
            name = f"{self._name}.{len(self._shards):04d}"
            self._shards.append(self._memory.allocate(name, self.row_bytes << self.shift))
            self.addresses = np.array([shard.ctypes.data for shard in self._shards], np.int64)

    @property
    def _space(self) -> Space:
        return self.addresses, self.shift, self.row_bytes

    def write(self, rows: Int64s, source: Tensor, index: Int64s, offset: int = 0) -> None:
        """Copy ``source[index[i]]`` to ``rows[i]``, from byte ``offset`` of the source's row on."""
        source, stride = _rowwise(source)
        scatter(self._space, rows, (source.data_ptr() + offset, stride, index))

    def differ(self, rows: Int64s, outer: int, source: Tensor, index: Int64s, out: Bools) -> None:
        """Set ``out[i]`` where rows (n, F) are not ``source[index[i]]``, laid out as :meth:`read` does, bit for bit.

        Entries that are set already are not looked at.
        """
        source, stride = _rowwise(source)
        differ(self._space, rows, outer, (source.data_ptr(), stride, index), out)

    def move(self, to: Int64s, rows: Int64s) -> None:
        """Copy ``rows[i]`` to ``to[i]``."""
        move(self._space, to, rows)

    def read(self, rows: Int64s, outer: int, out: Bytes) -> None:
        """Copy rows (B, F) to ``out`` as (B, outer, F, piece); row -1 reads as zeros."""
        if isinstance(self._memory, ReadOnlyAllocator):
            rows = self._map_rows(rows)
        gather(self._space, rows, outer, out)

    def _map_rows(self, rows: Int64s) -> Int64s:
        """Return rows that another process writes; those beyond its files come of a torn read, which shows later."""
        try:
            self.reserve(int(rows.max(initial=0)) + 1)
        except (FileNotFoundError, DataError):
            return np.minimum(rows, (len(self._shards) << self.shift) - 1)
        return rows

    def nbytes(self, rows: int, /) -> int:
        """Return bytes that the first ``rows`` rows take."""
        return rows * self.row_bytes

    def blocks(self) -> dict[str, Bytes]:
        """Return the shards by block name, for saving."""
        return {f"{self._name}.{i:04d}": shard for i, shard in enumerate(self._shards)}


def _rowwise(source: Tensor) -> tuple[Tensor, int]:
    """Return a tensor whose rows are contiguous, the same one where they are already, and the bytes from row to row."""
    if not source.is_contiguous() and source.shape[0] and not source[0].is_contiguous():
        source = source.contiguous()
    return source, source.stride(0) * source.element_size()
