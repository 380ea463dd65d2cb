"""The newest K frames of every environment, and how they become observations.

Frames lie in a ring, each in one piece: an append writes one frame and moves none, and a read gathers them straight
into the observation, oldest to newest.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace._kernels.compiled import helper, kernel, run
from headrace._kernels.words import weave2, weave3, weave4
from headrace.history._normalize import (
    Channels,
    add_sums,
    group_pixels,
    normalize_into,
    write_normalized,
)
from headrace.history.output import fresh, lasting_zeros
from headrace.ids import EnvRows, over
from headrace.types import StackSpec

_Bytes = npt.NDArray[np.uint8]
_Longs = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]

_SHARE_BYTES = 1 << 17
"""Waking a thread takes longer than moving less than this."""
_COPY_BYTES = 1 << 21
"""The fewest bytes for a thread that copies: observations come in step with an environment that has work for every
core, and waking a thread on a busy machine costs more than it saves."""
_NORMALIZE_BYTES = 1 << 15
"""Waking a thread takes longer than normalizing fewer."""


class OrderedFrames:
    """Owner of the K newest frames of N environments, zeros at first: a ring each, and which place shows which frame.

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
        self.num_envs = num_envs
        self.device = device
        self.axis = axis
        self.dtype = dtype
        """Of a frame."""
        self.shape = (num_envs, *frame_shape[:axis], length, *frame_shape[axis:])
        """Of ``data``."""
        self._groups = math.prod(frame_shape[:axis])
        self._inner_bytes = math.prod(frame_shape[axis:]) * dtype.itemsize
        self._on_cpu = device.type == "cpu"
        # on a device one place more: rows outside a mask are written there, since finding the others would wait
        self._memory = lasting_zeros((num_envs, length + (not self._on_cpu), *frame_shape), dtype, device)
        self.nbytes = self._memory.nbytes
        """Bytes of frames held, without those of ``data``."""
        self._places = lasting_zeros((num_envs, length), torch.int64, device).copy_(torch.arange(length, device=device))
        """Which place of its ring each frame is in, oldest to newest; after a reset all may show one."""
        self._head = lasting_zeros((num_envs,), torch.int64, device).fill_(length - 1)
        """The place that was written last."""
        self._all = torch.arange(num_envs, device=device)
        self._view: Tensor | None = None
        self._viewed = False

    @property
    def like(self) -> Tensor:
        """(N, *frame_shape), to look at shape and dtype alone."""
        return self._memory[:, 0]

    @property
    def data(self) -> Tensor:
        """(N, *frame_shape[:axis], K, *frame_shape[axis:]), oldest to newest.

        A block that is brought up to date when it is read here: always the same one.
        """
        if self._view is None:
            self._view = lasting_zeros(self.shape, self.dtype, self._memory.device)
        if not self._viewed:
            if self._on_cpu:
                self.gather(None, self._view, None)
            else:
                self._view.copy_(self.take(EnvRows(self.num_envs, None, None)))
            self._viewed = True
        return self._view

    @property
    def frames(self) -> Tensor:
        """(N, K, *frame_shape), oldest to newest: a view of ``data``."""
        return self.data.movedim(self.axis + 1, 1)

    def take(self, where: EnvRows) -> Tensor:
        """Return the rows of ``data`` that a call addresses, full ones with a mask; fresh."""
        ids = self._all if where.ids is None or where.mask is not None else where.ids
        if self._on_cpu:
            out = torch.empty((ids.shape[0], *self.shape[1:]), dtype=self.dtype)
            self.gather(ids, out, None)
            return out
        return self._memory[ids[:, None], self._places[ids]].movedim(1, self.axis + 1).contiguous()

    def load(self, data: Tensor) -> None:
        """Replace all frames by those of ``data``, as :attr:`data` has them."""
        self._viewed = False
        self._head.fill_(self.length - 1)
        self._places.copy_(torch.arange(self.length, device=self.device))
        self._memory[:, : self.length].copy_(data.movedim(self.axis + 1, 1))

    def clear(self, where: EnvRows) -> None:
        """Make the frames of some environments zero."""
        self._viewed = False
        where.fill(self._memory, 0)

    def pick(self, envs: Tensor, slots: Tensor) -> Tensor:
        """Return frames (m, *frame_shape): those in ``slots``, int64 (m,), of ``envs``, int64 (m,); fresh."""
        places = self._places[envs, slots]
        if not self._on_cpu:
            return self._memory[envs, places]
        # not by torch, whose threads cost more than the copy where other threads are awake
        rows = as_bytes(self._memory).reshape(self.num_envs * self.length, -1)
        found = torch.from_numpy(rows[(envs * self.length + places).numpy()])
        return found.view(self.dtype).view(len(places), *self._memory.shape[2:])

    def push(self, rows: Tensor, where: EnvRows, *, fill: Tensor) -> None:
        """Append a frame of some environments.

        Args:
            rows: (row_count, *frame_shape).
            where: the environments, and how ``rows`` line up with them.
            fill: bool (N,): environments whose every frame becomes the new one.
        """
        self._viewed = False
        if self._on_cpu:
            ids = (self._all if where.ids is None else where.ids).numpy()
            source = ids if where.mask is not None else np.arange(len(ids))
            rings, tables = as_bytes(self._memory), (self._places.numpy(), self._head.numpy())
            run(_push, len(ids), rings, as_bytes(rows), ids, source, fill.numpy(), *tables, min_rows=self._share)
            return
        head = (where.select(self._head) + 1) % self.length
        shown = torch.cat((where.select(self._places)[:, 1:], head[:, None]), dim=1)
        where.write(self._places, torch.where(where.select(fill)[:, None], head[:, None], shown))
        where.write(self._head, head)
        place = head if where.mask is None else head.where(where.mask, self.length)
        self._memory[where.select(self._all), place] = rows

    def make_room(self, ids: Tensor, by: Tensor) -> None:
        """Drop the ``by`` (n,) oldest frames of ``ids`` (n,); the newest slots mean nothing until :meth:`write`."""
        self._viewed = False
        head, source = self._head[ids], torch.arange(self.length, device=self.device) + by[:, None]
        kept = self._places[ids].gather(1, source.clamp(max=self.length - 1))
        self._places[ids] = torch.where(source < self.length, kept, (head[:, None] + 1 + source) % self.length)
        self._head[ids] = (head + by) % self.length

    def write(self, env_ids: Tensor, slots: Tensor, rows: Tensor, source: Tensor) -> None:
        """Put the frames of ``rows`` that ``source``, int64 (m,), picks into slots, int64 (m,), of environments.

        No slot twice, and only slots that are free since :meth:`make_room`: others may share a place.
        """
        self._viewed = False
        places = self._places[env_ids, slots]
        if self._on_cpu:
            given = as_bytes(rows), source.numpy(), env_ids.numpy(), places.numpy()
            run(_write, len(places), as_bytes(self._memory), *given, self.length, min_rows=self._share)
        else:
            self._memory[env_ids, places] = rows.index_select(0, source)

    def gather(self, ids: Tensor | None, out: Tensor, to: Tensor | None) -> None:
        """Write the frames of environment ``ids[i]``, as in ``data``, into row ``to[i]`` of ``out``; CPU only.

        None counts from 0; ``out`` is contiguous.
        """
        args = self._read_args(ids, to)
        least = _COPY_BYTES // (self._groups * self._inner_bytes * self.length) + 1
        run(_gather, len(args[0]), *args, as_bytes(out), min_rows=least)

    def gather_normalized(self, ids: Tensor | None, out: Tensor, to: Tensor | None, pictures: tuple[int, ...]) -> None:
        """Write what ``gather`` would, uint8, as normalized pictures (images, height, width, channels) per row."""
        images, height, width, channels = pictures
        args, pixels = self._read_args(ids, to), height * width
        target, least = out.view(out.shape[0], -1).numpy(), _NORMALIZE_BYTES // (images * pixels * channels) + 1
        group = group_pixels(pixels, channels)
        run(_gather_normalized, len(args[0]), *args, target, images, pixels, channels, group, min_rows=least)

    def peek(self, rows: Tensor, where: EnvRows, *, fill: Tensor) -> Tensor:
        """Return what the addressed rows of ``data`` would be after ``push``; fresh, nothing is changed.

        Rows outside a mask are as they are now.
        """
        after, fill, mask = self.take(where), where.select(fill), where.mask
        slots = after.unbind(self.axis + 1)
        every = torch.ones_like(fill) if mask is None else mask
        for target, newer in zip(slots, (*slots[1:], rows), strict=True):
            torch.where(over(every, target), newer, target, out=target)
            torch.where(over(fill & every, target), rows, target, out=target)
        return after

    def _read_args(self, ids: Tensor | None, to: Tensor | None) -> tuple[_Longs, _Longs, _Bytes, _Longs, int, int]:
        """Return what the kernels that read rings take first."""
        chosen = (self._all if ids is None else ids).numpy()
        places = np.arange(len(chosen)) if to is None else to.numpy()
        return chosen, places, as_bytes(self._memory), self._places.numpy(), self._groups, self._inner_bytes

    @property
    def _share(self) -> int:
        return _SHARE_BYTES // (self._groups * self._inner_bytes * self.length) + 1


def as_bytes(rows: Tensor) -> _Bytes:
    """(rows, bytes) of a CPU tensor; shares memory where it is contiguous."""
    # one element counts as contiguous whatever its strides are
    flat = rows.contiguous().as_strided((rows.numel(),), (1,)).view(torch.uint8)
    return flat.view(rows.shape[0], math.prod(rows.shape[1:]) * rows.dtype.itemsize).numpy()


@helper
def _copy(target: _Bytes, to: int, source: _Bytes, start: int, count: int) -> None:
    target, source = target[to : to + count], source[start : start + count]
    for j in range(count):
        target[j] = source[j]


@helper
def _weave(row: _Bytes, frames: _Bytes, shown: _Longs, groups: int, inner: int) -> None:
    """Write the frames in places ``shown`` (K,), each ``groups`` runs of ``inner`` bytes, into a row: run by run."""
    size, length = groups * inner, shown.shape[0]
    slot, stride = 0, length * inner
    while slot < length:
        together = min(length - slot, 4)
        a, b = shown[slot] * size, shown[min(slot + 1, length - 1)] * size
        c, d = shown[min(slot + 2, length - 1)] * size, shown[min(slot + 3, length - 1)] * size
        at, done = slot * inner, 0
        # colors: a load takes four bytes too many, which are not there behind the last frame
        while inner == 3 and together > 1 and done + 6 <= groups:
            to, of = at + done * stride, done * 3
            if together == 4:
                weave4(row, to, stride, frames, a + of, b + of, c + of, d + of)
            elif together == 3:
                weave3(row, to, stride, frames, a + of, b + of, c + of, d + of)
            else:
                weave2(row, to, stride, frames, a + of, b + of, c + of, d + of)
            done += 4
        for k in range(slot, slot + together):
            if length == 1:
                _copy(row, 0, frames, shown[k] * size, size)
            else:
                for g in range(done, groups):
                    _copy(row, g * stride + k * inner, frames, shown[k] * size + g * inner, inner)
        slot += together


@kernel()
def _push(
    start: int,
    stop: int,
    rings: _Bytes,
    rows: _Bytes,
    ids: _Longs,
    source: _Longs,
    fill: _Flags,
    places: _Longs,
    heads: _Longs,
) -> None:
    length = places.shape[1]
    size = rings.shape[1] // length
    for n in range(start, stop):
        env = ids[n]
        shown = places[env]
        new = heads[env] = (heads[env] + 1) % length
        for slot in range(length):
            shown[slot] = new if fill[env] or slot == length - 1 else shown[slot + 1]
        _copy(rings[env], new * size, rows[source[n]], 0, size)


@kernel()
def _write(
    start: int, stop: int, rings: _Bytes, rows: _Bytes, source: _Longs, ids: _Longs, places: _Longs, length: int
) -> None:
    size = rings.shape[1] // length
    for n in range(start, stop):
        _copy(rings[ids[n]], places[n] * size, rows[source[n]], 0, size)


@kernel()
def _gather(
    start: int, stop: int, ids: _Longs, to: _Longs, rings: _Bytes, places: _Longs, groups: int, inner: int, out: _Bytes
) -> None:
    for n in range(start, stop):
        _weave(out[to[n]], rings[ids[n]], places[ids[n]], groups, inner)


@kernel()
def _gather_normalized(
    start: int,
    stop: int,
    ids: _Longs,
    to: _Longs,
    rings: _Bytes,
    places: _Longs,
    groups: int,
    inner: int,
    out: npt.NDArray[np.float32],
    images: int,
    pixels: int,
    channels: int,
    group: int,
) -> None:
    """Normalize each row while it is in the cache."""
    row, size = np.empty(rings.shape[1], np.uint8), pixels * channels
    for n in range(start, stop):
        _weave(row, rings[ids[n]], places[ids[n]], groups, inner)
        target = out[to[n]]
        for first in range(0, images * size, size):
            sums = np.zeros(channels, np.int64)
            add_sums(row[first : first + size], channels, group, sums)
            write_normalized(row[first : first + size], target[first : first + size], sums, pixels, group)


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

    def take(self, frames: OrderedFrames, ids: Tensor | None) -> Tensor:
        """Return the observations of environments ``ids``, int64 (n,), or of all: fresh memory that the receiver
        owns."""
        count = frames.num_envs if ids is None else int(ids.shape[0])
        out = fresh((count, *self.shape), self.dtype, frames.device)
        self._write(frames, ids, out, None)
        return out

    def put(self, frames: OrderedFrames, ids: Tensor, out: Tensor) -> None:
        """Write the observations of environments ``ids``, int64 (n,), into the same rows of ``out`` (N, …)."""
        self._write(frames, ids, out, ids)

    def normalize(self, data: Tensor, out: Tensor | None = None) -> Tensor:
        """Return frames (n, …, K, …) as normalized stacks: ``out`` (n, *shape), contiguous, or fresh memory."""
        found = fresh(tuple(data.shape), torch.float32, data.device) if out is None else out.view(data.shape)
        if self._pictures and data.numel():
            flat = (-1, *self._pictures[1:])
            normalize_into(data.reshape(flat), found.view(flat), "last")
        elif data.numel():
            for slot in range(self._spec.frames):
                normalize_into(data.select(self._axis, slot), found.select(self._axis, slot), self._channels)
        return self.layout(found)

    def _write(self, frames: OrderedFrames, ids: Tensor | None, out: Tensor, to: Tensor | None) -> None:
        """Write the observation of environment ``ids[i]`` to row ``to[i]`` of ``out``; None counts from 0."""
        if not out.numel() or (ids is not None and not ids.shape[0]):
            return
        on_cpu = frames.device.type == "cpu"
        if on_cpu and not self._normalize:
            # not by torch, whose threads cost more than the copy where other threads are awake
            frames.gather(ids, out, to)
            return
        if on_cpu and self._pictures and self._frame_dtype == torch.uint8:
            # a plane of a channel-first picture is a picture with one channel
            frames.gather_normalized(ids, out, to, self._pictures)
            return
        rows = frames.take(EnvRows(frames.num_envs, ids, None))
        if not self._normalize:
            stacks, target = self.layout(rows), out.view(frames.dtype)
        else:
            stacks, target = self.normalize(rows.view(self._frame_dtype), out if to is None else None), out
        if to is not None:
            target.index_copy_(0, to, stacks)
        elif not self._normalize:
            target.copy_(stacks)

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
