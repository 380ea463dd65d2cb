"""Frames kept in memory from oldest to newest, so that a stack of them is a plain view.

A ring would save the move of K − 1 frames per append, but its newest K frames are contiguous only while every
environment is at the same position; one partial append breaks that. Here the frames of the appended environments
move one slot down instead. With small frames that is a copy within the cache.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace import _device
from headrace._kernels.compiled import helper, kernel, run
from headrace.history._normalize import Channels, normalize_into, normalize_rows
from headrace.history.output import fresh, lasting_zeros
from headrace.ids import EnvRows, over
from headrace.types import StackSpec

_Bytes = npt.NDArray[np.uint8]
_Longs = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]

_PIECE = 1024
_SHARE_BYTES = 1 << 17
"""Waking a thread takes longer than moving less than this."""
_COPY_BYTES = 1 << 21
"""The fewest bytes for a thread that copies: observations come in step with an environment that has work for every
core, and waking a thread on a busy machine costs more than it saves."""


class OrderedFrames:
    """Owner of ``data``: (N, *frame_shape[:axis], K, *frame_shape[axis:]), zeros at first.

    Everything but ``data`` itself is given or returned as rows of frames; see each method for who owns them.
    """

    def __init__(
        self,
        length: int,
        num_envs: int,
        frame_shape: tuple[int, ...],
        axis: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.length = length
        self.axis = axis
        self._groups = math.prod(frame_shape[:axis])
        self._inner_bytes = math.prod(frame_shape[axis:]) * dtype.itemsize
        self._env_bytes = self._groups * self._inner_bytes * length
        self.data = lasting_zeros((num_envs, *frame_shape[:axis], length, *frame_shape[axis:]), dtype, device)

    @property
    def frames(self) -> Tensor:
        """(N, K, *frame_shape), oldest to newest: a view of ``data``."""
        return self.data.movedim(self.axis + 1, 1)

    def push(self, rows: Tensor | None, where: EnvRows, *, by: Tensor, fill: Tensor) -> None:
        """Move the frames of some environments down and write the newest.

        Args:
            rows: (row_count, *frame_shape); None only moves, and what is in the slots that become free means nothing:
                ``write`` fills them.
            where: the environments, and how ``rows`` line up with them.
            by: int64 (N,), at least 1 where addressed: how many slots to move; slots in between are zeroed.
            fill: bool (N,): environments whose every slot becomes the new frame.
        """
        if _device.has_warp(self.data.device):
            from headrace.history._warp import push_warp  # an extra, loaded on use

            given = None if rows is None else self._apart(rows)
            sizes = {"inner_bytes": self._inner_bytes, "length": self.length}
            push_warp(self.data, given, where.ids, where.mask, by, fill, **sizes)
            return
        if self.data.device.type != "cpu":
            mask = where.mask
            if mask is None and where.ids is not None:
                mask = torch.zeros(where.num_envs, dtype=torch.bool, device=self.data.device)
                mask.index_fill_(0, where.ids, True)
                if rows is not None:
                    full = torch.empty((where.num_envs, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
                    rows = full.index_copy_(0, where.ids, rows)
            self._move(self.data, rows, by, fill, mask)
            return
        ids = np.arange(where.num_envs) if where.ids is None else where.ids.numpy()
        data = as_bytes(self.data)
        new = as_bytes(self._apart(rows)) if rows is not None else np.empty((0, 0), np.uint8)
        run(
            _push,
            len(ids),
            data,
            new,
            ids,
            np.arange(len(ids)) if where.mask is None else ids,
            by.numpy(),
            fill.numpy(),
            self._groups,
            self._inner_bytes,
            self.length,
            min_rows=_SHARE_BYTES // max(self._env_bytes, 1) + 1,
        )

    def write(self, env_ids: Tensor, slots: Tensor, rows: Tensor, source: Tensor | None = None) -> None:
        """Put frames into slots, int64 (m,), of environments, int64 (m,); no slot twice.

        ``rows`` are m frames (m, *frame_shape), or those that ``source``, int64 (m,), picks: one frame may go into
        several slots.
        """
        if self.data.device.type != "cpu":
            self.frames[env_ids, slots] = rows if source is None else rows.index_select(0, source)
            return
        run(
            _write,
            env_ids.shape[0],
            as_bytes(self.data),
            as_bytes(rows),
            np.arange(env_ids.shape[0]) if source is None else source.numpy(),
            env_ids.numpy(),
            slots.numpy(),
            self._groups,
            self._inner_bytes,
            self.length,
            min_rows=_SHARE_BYTES // max(self._groups * self._inner_bytes, 1) + 1,
        )

    def peek(self, rows: Tensor, where: EnvRows, *, by: Tensor, fill: Tensor) -> Tensor:
        """Return what the addressed rows of ``data`` would be after ``push``; fresh, nothing is changed.

        Rows outside a mask are as they are now.
        """
        after = where.select(self.data)
        after = after.clone() if after.data_ptr() == self.data.data_ptr() else after
        self._move(after, rows, where.select(by), where.select(fill), where.mask)
        return after

    def peek_slot(self, slot: int, rows: Tensor, where: EnvRows, *, by: Tensor, fill: Tensor) -> Tensor:
        """Return one slot of what :meth:`peek` gives, (n, *frame_shape): fresh, and nothing larger on the way."""
        by, fill = where.select(by), where.select(fill)
        if where.mask is not None:
            by = by * where.mask
        source = by + slot
        compact = where.ids is not None and where.mask is None
        ids = where.ids if compact else torch.arange(len(by), device=by.device)
        frame = self.data.movedim(self.axis + 1, 1)[ids, source.clamp(max=self.length - 1)]
        frame.masked_fill_(over(source >= self.length, frame), 0)
        self._put(frame, rows, torch.ones_like(fill) if slot == self.length - 1 else fill, where.mask)
        return frame

    def _apart(self, rows: Tensor) -> Tensor:
        """Return rows that do not share memory with ``data``, which moves while they are read."""
        shared = rows.untyped_storage().data_ptr() == self.data.untyped_storage().data_ptr()
        return rows.clone() if shared else rows

    def _move(self, data: Tensor, rows: Tensor | None, by: Tensor, fill: Tensor, mask: Tensor | None) -> None:
        """``push`` in plain torch, in place on rows (n, …, K, …), those of ``mask`` bool (n,) or all.

        Slot by slot, so that no temporary is larger than the flags; a frame may move by any number of slots. No host
        synchronization.
        """
        axis = self.axis + 1
        if rows is not None and rows.untyped_storage().data_ptr() == data.untyped_storage().data_ptr():
            rows = rows.clone()
        for slot in range(self.length):
            target = data.select(axis, slot)
            for source in range(slot + 1, self.length):
                self._put(target, data.select(axis, source), by == source - slot, mask)
            gone = by + slot >= self.length
            target.masked_fill_(over(gone if mask is None else gone & mask, target), 0)
            if rows is not None:
                self._put(target, rows, torch.ones_like(fill) if slot == self.length - 1 else fill, mask)

    @staticmethod
    def _put(target: Tensor, values: Tensor, chosen: Tensor, mask: Tensor | None) -> None:
        torch.where(over(chosen if mask is None else chosen & mask, target), values, target, out=target)


def as_bytes(rows: Tensor) -> _Bytes:
    """(rows, bytes) of a CPU tensor; shares memory where it is contiguous."""
    # one element counts as contiguous whatever its strides are
    flat = rows.contiguous().as_strided((rows.numel(),), (1,)).view(torch.uint8)
    return flat.view(rows.shape[0], math.prod(rows.shape[1:]) * rows.dtype.itemsize).numpy()


@helper
def _move_down(data: _Bytes, distance: int) -> None:
    """data[i] = data[i + distance]; through a small piece, since the compiler must assume that the two overlap."""
    piece = np.empty(_PIECE, np.uint8)
    size = data.shape[0] - distance
    whole = size // _PIECE
    for k in range(whole):
        source = data[k * _PIECE + distance : k * _PIECE + distance + _PIECE]
        target = data[k * _PIECE : k * _PIECE + _PIECE]
        for j in range(_PIECE):
            piece[j] = source[j]
        for j in range(_PIECE):
            target[j] = piece[j]
    for i in range(whole * _PIECE, size):
        data[i] = data[i + distance]


@helper
def _write_slot(data: _Bytes, row: _Bytes, groups: int, inner: int, length: int, slot: int) -> None:
    """Scatter one frame into its slot: ``groups`` runs of ``inner`` bytes, one in every ``length`` runs."""
    if length == 1:
        groups, inner = 1, groups * inner
    stride = inner * length
    start = slot * inner
    # the inner loop of one or three channels is unrolled by hand: twice as fast as the general one
    if inner == 1:
        for g in range(groups):
            data[g * stride + start] = row[g]
    elif inner == 3:
        for g in range(groups):
            to = g * stride + start
            data[to] = row[g * 3]
            data[to + 1] = row[g * 3 + 1]
            data[to + 2] = row[g * 3 + 2]
    else:
        for g in range(groups):
            target = data[g * stride + start : g * stride + start + inner]
            source = row[g * inner : g * inner + inner]
            for j in range(inner):
                target[j] = source[j]


@helper
def _zero_slot(data: _Bytes, groups: int, inner: int, length: int, slot: int) -> None:
    for g in range(groups):
        start = (g * length + slot) * inner
        data[start : start + inner] = 0


@helper
def _push_env(
    block: _Bytes, row: _Bytes, steps: int, fill: bool, writes: bool, groups: int, inner: int, length: int
) -> None:
    """See ``OrderedFrames.push``, for one environment."""
    if writes and fill:
        for slot in range(length):
            _write_slot(block, row, groups, inner, length, slot)
        return
    steps = min(steps, length)
    if steps < length:
        # moving the whole block also carries each group's first slots into the previous group's last ones; exactly
        # those are written next, or by ``write``
        _move_down(block, steps * inner)
    if writes:
        for slot in range(length - steps, length - 1):
            _zero_slot(block, groups, inner, length, slot)
        _write_slot(block, row, groups, inner, length, length - 1)


@kernel()
def _push(
    start: int,
    stop: int,
    data: _Bytes,
    rows: _Bytes,
    ids: _Longs,
    source: _Longs,
    by: _Longs,
    fill: _Flags,
    groups: int,
    inner: int,
    length: int,
) -> None:
    """``rows`` without rows means: only move."""
    writes = rows.shape[0] > 0
    for n in range(start, stop):
        env = ids[n]
        row = rows[source[n]] if writes else data[env, :0]
        _push_env(data[env], row, int(by[env]), bool(fill[env]), writes, groups, inner, length)


@kernel()
def _write(
    start: int,
    stop: int,
    data: _Bytes,
    rows: _Bytes,
    source: _Longs,
    ids: _Longs,
    slots: _Longs,
    groups: int,
    inner: int,
    length: int,
) -> None:
    for n in range(start, stop):
        _write_slot(data[ids[n]], rows[source[n]], groups, inner, length, int(slots[n]))


class StackOutput:
    """How rows of frames (n, …, K, …), as ``OrderedFrames`` keeps them, become observations; owns nothing.

    Args:
        spec: K and layout.
        frame_shape: the shape of one environment's frame.
        dtype: of a frame.
        channels: where a frame has its channels; used to normalize.
        normalize: observations are float32, x/255 minus each frame's mean per channel.
    """

    def __init__(
        self, spec: StackSpec, frame_shape: tuple[int, ...], dtype: torch.dtype, channels: Channels, normalize: bool
    ) -> None:
        self.shape = spec.stacked_shape(frame_shape)
        """Of one environment's observation."""
        self.dtype = torch.float32 if normalize else dtype
        """Of an observation."""
        self._spec = spec
        self._frame_shape = frame_shape
        self._frame_dtype = dtype
        self._axis = spec.axis(len(frame_shape)) + 1
        self._channels: Channels = channels
        self._normalize = normalize
        self._pictures = self._as_pictures()

    def layout(self, data: Tensor) -> Tensor:
        """(n, …, K, …) as stacks: a view."""
        return data if self._spec.layout == "new_axis" else data.flatten(self._axis, self._axis + 1)

    def take(self, data: Tensor, ids: Tensor | None) -> Tensor:
        """Return the observations of rows ``ids``, int64 (n,), of ``data``, or of all: fresh memory that the receiver
        owns."""
        count = data.shape[0] if ids is None else int(ids.shape[0])
        out = fresh((count, *self.shape), self.dtype, data.device)
        self._write(data, ids, out, None)
        return out

    def put(self, data: Tensor, ids: Tensor, out: Tensor) -> None:
        """Write the observations of rows ``ids``, int64 (n,), of ``data`` into the same rows of ``out`` (N, …)."""
        self._write(data, ids, out, ids)

    def _write(self, data: Tensor, ids: Tensor | None, out: Tensor, to: Tensor | None) -> None:
        """Copy row ``ids[i]`` of ``data`` to row ``to[i]`` of ``out``; None counts from 0."""
        if not out.numel() or (ids is not None and not ids.shape[0]):
            return
        if self._normalize:
            self._write_normalized(data.view(self._frame_dtype), ids, out, to)
            return
        out = out.view(data.dtype)
        if data.device.type == "cpu":
            # not by torch, whose threads cost more than the copy where other threads are awake
            source, target = as_bytes(data), as_bytes(out)
            if ids is None or to is None:
                taken = np.arange(len(source)) if ids is None else ids.numpy()
                run(_take_rows, len(taken), source, taken, target, min_rows=_COPY_BYTES // source.shape[1] + 1)
            else:
                for row, place in zip(ids.tolist(), to.tolist(), strict=True):
                    target[place] = source[row]
        elif ids is not None and _device.has_warp(data.device):
            from headrace.history._warp import copy_rows_warp  # an extra, loaded on use

            copy_rows_warp(data, ids, out, _count_to(ids) if to is None else to)
        else:
            _place(self.layout(data if ids is None else data.index_select(0, ids)), out, to)

    def _write_normalized(self, data: Tensor, ids: Tensor | None, out: Tensor, to: Tensor | None) -> None:
        if self._pictures and data.dtype == torch.uint8:
            flat = (-1, *self._pictures[1:])
            if _device.has_warp(data.device):
                from headrace.history._warp import normalize_warp  # an extra, loaded on use

                rows = None if ids is None else (ids, _count_to(ids) if to is None else to)
                normalize_warp(data.view(flat), out.view(flat), rows, self._pictures[0])
                return
            if data.device.type == "cpu":
                count = data.shape[0] if ids is None else ids.shape[0]
                source, target = (np.arange(count) if rows is None else rows.numpy() for rows in (ids, to))
                # a plane of a channel-first picture is a picture with one channel
                normalize_rows(data.view(-1, *self._pictures), out.view(-1, *self._pictures), source, target)
                return
        data = data if ids is None else data.index_select(0, ids)
        found = torch.empty(data.shape, dtype=torch.float32, device=data.device)
        if self._pictures:
            flat = (-1, *self._pictures[1:])
            normalize_into(data.reshape(flat), found.view(flat), "last")
        else:
            for slot in range(self._spec.frames):
                normalize_into(data.select(self._axis, slot), found.select(self._axis, slot), self._channels)
        _place(self.layout(found), out, to)

    def _as_pictures(self) -> tuple[int, ...]:
        """Return the shape (images, height, width, channels) that makes the K frames of a row more images or more
        channels.

        So that one pass does the whole stack; () where frames are interleaved with the rows or columns of a picture.
        """
        axis, length = self._axis - 1, self._spec.frames
        if not self._normalize:
            return ()
        if self._channels == "none":
            height, width = self._frame_shape
            return {0: (length, height, width, 1), 2: (1, height, width, length)}.get(axis, ())
        if self._channels == "first":
            depth, height, width = self._frame_shape
            return (depth * length, height, width, 1) if axis <= 1 else ()
        height, width, depth = self._frame_shape
        if axis == 0:
            return (length, height, width, depth)
        return (1, height, width, depth * length) if axis >= 2 else ()


def _take_rows(start: int, stop: int, data: _Bytes, ids: npt.NDArray[np.int64], out: _Bytes) -> None:
    # whole rows at a time, without the interpreter's lock
    np.take(data, ids[start:stop], axis=0, out=out[start:stop], mode="clip")


def _place(rows: Tensor, out: Tensor, to: Tensor | None) -> None:
    if to is None:
        out.copy_(rows)
    else:
        out.index_copy_(0, to, rows)


def _count_to(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[0], device=ids.device)
