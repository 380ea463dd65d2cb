"""What callers receive: fresh memory without page faults, and stacks of frames written into it.

Memory fresh from the system costs a page fault per 4 KiB at first touch, most of the time of writing a large
observation, so blocks are handed out again once nobody holds them. A block of the pool is a numpy array under
``torch.from_numpy``: the tensor's storage keeps a reference to it, and so does every view of the tensor, its
``numpy()`` and its DLPack capsule. When the count of references is back to that of an idle block, no reader is left.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace import _device
from headrace._kernels.compiled import run
from headrace._kernels.normalize import Channels, normalize_into, normalize_rows
from headrace.buffers._ordered import as_bytes
from headrace.errors import ConfigError
from headrace.types import StackSpec

_ALIGNMENT = 64
"""A cache line; vector stores and torch's own CPU tensors use the same."""
_SMALL = 1 << 18
"""Below this many bytes malloc reuses its own warm memory and the pool would only add bookkeeping."""
_ALWAYS_KEPT = 2
"""A consumer that holds the last observation while the next is made needs two, however large they are."""

_HUGE_PAGE = 1 << 21
_SHARE_BYTES = 1 << 21
"""The fewest bytes for a thread that copies: observations come in step with an environment that has work for every
core, and waking a thread on a busy machine costs more than it saves."""

_Block = npt.NDArray[np.uint8]


def anonymous(nbytes: int, *, sparse: bool = False) -> _Block:
    """Zeroed private memory; pages appear when they are first written: huge ones where the kernel agrees.

    ``sparse``: small ones, for memory of which most is never written.
    """
    block = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= 2 * _HUGE_PAGE and not sparse:
        block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8, nbytes)


class OutputPool:
    """Hands out uninitialized CPU tensors; a block returns by itself when no tensor or view of it lives.

    Safe to call from several threads. What it remembers is bounded by ``max_bytes`` (but for the two most recent
    blocks): when blocks beyond it are in use they are forgotten, oldest first, and freed by their last holder.
    """

    def __init__(self, max_bytes: int = 1 << 30, *, pinned: bool = False) -> None:
        """Begin empty. ``pinned``: memory that a CUDA device copies from quickly; torch keeps it for reuse itself."""
        if max_bytes < 0:
            raise ConfigError(f"OutputPool.max_bytes: expected 0 or more, got {max_bytes}")
        self._max_bytes = max_bytes
        self._pinned = pinned
        self._blocks: list[_Block] = []
        self._lock = threading.Lock()
        self._idle_references = _references([np.empty(0, np.uint8)], 0)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized contiguous CPU tensor that shares memory with no tensor alive.

        The receiver owns it: it may keep it, or views of it, for as long as it likes.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if self._pinned:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        if nbytes < _SMALL:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            block = self._idle_block(nbytes)
            # the tensor must hold the block before another thread may look at the count
            return torch.from_numpy(block[_padding(block) :][:nbytes]).view(dtype).view(shape)

    def clear(self) -> None:
        """Forget every block. Tensors that were handed out stay valid."""
        with self._lock:
            self._blocks.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all remembered blocks, in use or idle."""
        with self._lock:
            return sum(block.nbytes for block in self._blocks)

    def _idle_block(self, nbytes: int) -> _Block:
        """An idle block of this size, new if need be, moved to the end of the list (most recent)."""
        wanted = nbytes + _ALIGNMENT
        blocks = self._blocks
        # the block used last is the likeliest to be in a cache
        for index in reversed(range(len(blocks))):
            if blocks[index].nbytes == wanted and _references(blocks, index) == self._idle_references:
                block = blocks.pop(index)
                blocks.append(block)
                return block
        block = anonymous(wanted)
        blocks.append(block)
        held = sum(other.nbytes for other in blocks)
        while held > self._max_bytes and len(blocks) > _ALWAYS_KEPT:
            held -= blocks.pop(0).nbytes
        return block


def _references(blocks: list[_Block], index: int) -> int:
    # measured on an idle block by the same expression, so that it does not matter what the interpreter adds
    return sys.getrefcount(blocks[index])


def _padding(block: _Block) -> int:
    return -block.ctypes.data % _ALIGNMENT


_pool = OutputPool()


def fresh(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized memory that nobody else reads; on the CPU from a pool without page faults."""
    if device.type == "cpu":
        return _pool.take(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


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
        """The observations of rows ``ids``, int64 (n,), of ``data``, or of all: fresh memory that the receiver owns."""
        count = data.shape[0] if ids is None else int(ids.shape[0])
        out = fresh((count, *self.shape), self.dtype, data.device)
        self._write(data, ids, out, None)
        return out

    def put(self, data: Tensor, ids: Tensor, out: Tensor) -> None:
        """Write the observations of rows ``ids``, int64 (n,), of ``data`` into the same rows of ``out`` (N, …)."""
        self._write(data, ids, out, ids)

    def _write(self, data: Tensor, ids: Tensor | None, out: Tensor, to: Tensor | None) -> None:
        """Row ``ids[i]`` of ``data`` becomes row ``to[i]`` of ``out``; None counts from 0."""
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
                run(_take_rows, len(taken), source, taken, target, min_rows=_SHARE_BYTES // source.shape[1] + 1)
            else:
                for row, place in zip(ids.tolist(), to.tolist(), strict=True):
                    target[place] = source[row]
        elif ids is not None and _device.has_warp(data.device):
            from headrace._kernels.frames_warp import copy_rows_warp  # an extra, loaded on use

            copy_rows_warp(data, ids, out, _count_to(ids) if to is None else to)
        else:
            _place(self.layout(data if ids is None else data.index_select(0, ids)), out, to)

    def _write_normalized(self, data: Tensor, ids: Tensor | None, out: Tensor, to: Tensor | None) -> None:
        if self._pictures and data.dtype == torch.uint8:
            flat = (-1, *self._pictures[1:])
            if _device.has_warp(data.device):
                from headrace._kernels.normalize_warp import normalize_warp  # an extra, loaded on use

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
        """The shape (images, height, width, channels) that makes the K frames of a row more images or more channels.

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


def _take_rows(start: int, stop: int, data: _Block, ids: npt.NDArray[np.int64], out: _Block) -> None:
    # whole rows at a time, without the interpreter's lock
    np.take(data, ids[start:stop], axis=0, out=out[start:stop], mode="clip")


def _place(rows: Tensor, out: Tensor, to: Tensor | None) -> None:
    if to is None:
        out.copy_(rows)
    else:
        out.index_copy_(0, to, rows)


def _count_to(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[0], device=ids.device)
