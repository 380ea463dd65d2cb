"""Rows of bytes in and out of sharded memory: the kernels that move frames.

A *row space* is a list of shards of equal size, each holding ``2 ** shift`` rows of ``row_bytes`` bytes; row ``r`` is
in shard ``r >> shift``. Shards are known by their addresses (int64), so the same kernels serve anonymous memory, files
and copy-on-write checkpoints, and the space can grow without moving. The caller keeps the shards alive and the row
numbers in range: kernels do not check.

Copies go through the C library's ``memcpy``, which is what bounds their speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias, cast

import numpy as np
from numba.core import types as _types
from numpy.typing import NDArray

from headrace._kernels.compiled import helper, inline, kernel, run

Int64s: TypeAlias = NDArray[np.int64]
Bytes: TypeAlias = NDArray[np.uint8]
Bools: TypeAlias = NDArray[np.bool_]
Space: TypeAlias = tuple[Int64s, int, int]
"""A row space: addresses of its shards, ``shift``, ``row_bytes``."""
Source: TypeAlias = tuple[int, int, Int64s]
"""Rows somewhere else: address of the first, bytes from one to the next, which of them are meant."""

ZERO_ROW = -1
"""A row number that reads as zeros."""

_READ_SHARE = 1 << 19
_WRITE_SHARE = 1 << 21
"""The fewest bytes for a thread: waking one for less costs more than it saves, and much more on a busy machine. Writes
come in step with an environment that has work for every core, so they stay on one thread for longer."""

memcpy = cast(
    "Callable[[int, int, int], int]",
    _types.ExternalFunction("memcpy", _types.intp(_types.intp, _types.intp, _types.intp)),
)
_memcmp = cast(
    "Callable[[int, int, int], int]",
    _types.ExternalFunction("memcmp", _types.int32(_types.intp, _types.intp, _types.intp)),
)
_memset = cast(
    "Callable[[int, int, int], int]",
    _types.ExternalFunction("memset", _types.intp(_types.intp, _types.int32, _types.intp)),
)


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
    for b in range(start, stop):
        _gather_sample(space, rows, b, outer, base + b * size, scratch)


class Pace:
    """Whether threads pay at the moment.

    A team is as slow as its last member: where another program has one of the cores, a copy of half a millisecond waits
    for a time slice of several. One call that is far slower than the best so far sends the next ones to one thread.
    """

    _FAR = 4.0
    _ALONE = 64

    def __init__(self) -> None:
        self._best = 0.0
        self._alone = 0

    def together(self) -> bool:
        """Whether the next copy should use threads."""
        if self._alone:
            self._alone -= 1
            return False
        return True

    def took(self, seconds: float, nbytes: int) -> None:
        """A copy with threads has taken so long."""
        rate = nbytes / max(seconds, 1e-9)
        if rate * self._FAR < self._best:
            self._alone = self._ALONE
        self._best = max(self._best, rate)


_paces: dict[tuple[int, int], Pace] = {}
"""By bytes of a row and pieces of it: what is quick for one kind of copy is slow for another."""


def gather(space: Space, rows: Int64s, outer: int, out: Bytes) -> None:
    """Copy rows (B, F) into ``out``, uint8 (B · F · row_bytes,), which the caller owns.

    ``outer`` splits every frame into that many equal pieces; the output is laid out as (B, outer, F, piece), so that
    frames can be concatenated along an inner axis without a second pass. ``outer == 1`` is (B, F, frame).
    ``ZERO_ROW`` reads as zeros.
    """
    size = rows.shape[1] * space[2]
    if len(rows) * size < 2 * _READ_SHARE:
        _gather(0, len(rows), space, rows, outer, out)
        return
    pace = _paces.setdefault((space[2], outer), Pace())
    threads = None if pace.together() else 1
    start = time.perf_counter()
    run(_gather, len(rows), space, rows, outer, out, min_rows=_share(_READ_SHARE, size), threads=threads)
    if threads is None:
        pace.took(time.perf_counter() - start, len(rows) * size)


def _share(nbytes: int, row_bytes: int) -> int:
    """How many rows make so many bytes."""
    return nbytes // max(row_bytes, 1) + 1


@kernel()
def _scatter(start: int, stop: int, space: Space, rows: Int64s, source: Source) -> None:
    first, stride, index = source
    for i in range(start, stop):
        memcpy(_address(space, rows[i]), first + index[i] * stride, space[2])


def scatter(space: Space, rows: Int64s, source: Source) -> None:
    """Write row ``rows[i]`` from row i of the source; rows are distinct, memory is borrowed."""
    run(_scatter, len(rows), space, rows, source, min_rows=_share(_WRITE_SHARE, space[2]))


@helper
def _words_differ(ours: Bytes, theirs: Bytes) -> bool:
    """Whether four frames, one after another, are not the interleaved ones: a word is a byte of each."""
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
    """Whether frames of ``outer`` pieces, one after another, are not the interleaved ones."""
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
        if _memcmp(_address(space, rows[sample, f]), here + f * row_bytes, row_bytes) != 0:
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
    share = _share(_WRITE_SHARE, rows.shape[1] * space[2])
    run(_differ, len(rows), space, rows, outer, source, out, min_rows=share)


@kernel()
def _rows_differ(start: int, stop: int, first: Source, second: Source, nbytes: int, out: Bools) -> None:
    one, one_stride, ones = first
    other, other_stride, others = second
    for i in range(start, stop):
        if not out[i]:
            out[i] = _memcmp(one + ones[i] * one_stride, other + others[i] * other_stride, nbytes) != 0


def rows_differ(first: Source, second: Source, nbytes: int, out: Bools) -> None:
    """Set ``out[i]`` where ``nbytes`` bytes of row i of either source are not the same."""
    run(_rows_differ, len(out), first, second, nbytes, out, min_rows=_share(_READ_SHARE, nbytes))


@kernel()
def move(space: Space, to: Int64s, rows: Int64s) -> None:
    """Copy row ``rows[i]`` to row ``to[i]`` of the same space; no row may be on both sides."""
    for i in range(rows.shape[0]):
        memcpy(_address(space, to[i]), _address(space, rows[i]), space[2])
