"""Memory of the buffers, and memory that callers receive: fresh, and without page faults.

Memory fresh from the system costs a page fault per 4 KiB at first touch, most of the time of writing a large
observation, so blocks are handed out again once nothing holds them. A block of the pool is a numpy array under
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

from headrace.errors import ConfigError, DataError
from headrace.types import StateDict

_ALIGNMENT = 64
"""A cache line; vector stores and torch's own CPU tensors use the same."""
_SMALL = 1 << 18
"""Below this many bytes malloc reuses its own warm memory and the pool would only add bookkeeping."""
_ALWAYS_KEPT = 2
"""A consumer that holds the last observation while the next is made needs two, however large they are."""

_HUGE_PAGE = 1 << 21
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
        """Return an uninitialized contiguous CPU tensor that shares memory with no tensor alive.

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
        """Return an idle block of this size, new if need be, moved to the end of the list (most recent)."""
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
    """Return uninitialized memory of its own; on the CPU from a pool without page faults."""
    if device.type == "cpu":
        return _pool.take(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By bytes. torch can store every dtype but neither fill nor select some: the buffers only move bytes."""


def carry_rows(rows: Tensor) -> Tensor:
    """``rows`` as the buffers keep them, the same bits: a view, without the history of gradients."""
    return rows.detach().view(_CARRIERS[rows.dtype.itemsize])


def lasting_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that may be written to later, also if they are made inside ``torch.inference_mode()``."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def load_tensors(own: dict[str, Tensor], state: StateDict) -> None:
    """Copy tensors of ``state`` into the tensors of the same name; one that does not fit raises before any changes."""
    for name, tensor in own.items():
        given = state.get(name)
        if not isinstance(given, Tensor) or given.shape != tensor.shape or given.dtype != tensor.dtype:
            got = f"{tuple(given.shape)} of {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
            raise DataError(f"{name}: expected {tuple(tensor.shape)} of {tensor.dtype}, got {got}")
    for name, tensor in own.items():
        tensor.copy_(state[name])


def read_stored_frames(state: StateDict) -> Tensor | None:
    """``state["frames"]`` of a buffer's snapshot: None where nothing was appended yet, else with N and K axes."""
    if "frames" not in state:
        raise DataError(f"frames: expected them in the state, got only {', '.join(state) or 'an empty one'}")
    frames = state["frames"]
    if frames is None or (isinstance(frames, Tensor) and frames.dim() >= 2):
        return frames
    got = f"shape {tuple(frames.shape)}" if isinstance(frames, Tensor) else type(frames).__name__
    raise DataError(f"frames: expected None or a tensor with at least 2 axes, got {got}")
