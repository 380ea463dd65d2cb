"""Fresh CPU tensors without page faults: blocks are handed out again once nobody holds them.

Memory fresh from the system costs a page fault per 4 KiB at first touch, most of the time of writing a large
observation. A block of this pool is a numpy array under ``torch.from_numpy``: the tensor's storage keeps a reference
to it, and so does every view of the tensor, its ``numpy()`` and its DLPack capsule. When the count of references is
back to that of an idle block, no reader is left.
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

from headrace.errors import ConfigError

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
