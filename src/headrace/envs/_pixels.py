"""The newest frames of every environment as they were last drawn, and what becomes of them in an observation."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._device import to_device
from headrace.envs.image_spec import ImageSpec
from headrace.history.ordered import OrderedFrames, StackOutput
from headrace.history.output import anonymous
from headrace.ids import EnvRows

_SPARSE = 1 << 18
"""Below this many bytes zeros are written: a process has a limited number of mappings, and callers may keep many."""


class Pixels:
    """The newest K frames of N environments as they were last drawn, in the dtype that the camera gives.

    Owns this one copy: observations are written from it straight into the tensor that the caller receives, and
    normalized on the way. Ids are int64, checked before.
    """

    def __init__(self, spec: ImageSpec, num_envs: int, device: torch.device) -> None:
        dtype = torch.from_numpy(np.empty(0, spec.dtype)).dtype
        shape, axis = spec.frame_shape, spec.stack.axis(len(spec.frame_shape))
        self._frames = OrderedFrames(spec.frames, num_envs, shape, axis, dtype, device)
        self.data = self._frames.data
        """The frames themselves, (N, …, K, …): the memory, not a copy."""
        self._output = StackOutput(
            spec.stack,
            shape,
            dtype,
            "last" if spec.layout == "channels_last" else "first",
            # numbers that are no colors were normalized frame by frame
            normalize=spec.normalize and spec.dtype == np.uint8,
        )
        self._length = spec.frames
        # on the CPU the host's numbers are where they are needed
        self._there = torch.from_numpy if device.type == "cpu" else partial(there_on, device=device)
        self._one = torch.ones(num_envs, dtype=torch.int64, device=device)
        self._still, self._first = (torch.full((num_envs,), flag, device=device) for flag in (False, True))

    def update(
        self,
        ids: NDArray[np.int64],
        by: NDArray[np.int64],
        envs: NDArray[np.int64],
        slots: NDArray[np.int64],
        new: Tensor,
        source: NDArray[np.int64],
    ) -> None:
        """Bring stacks up to date.

        Args:
            ids: (n,): whose stacks.
            by: (n,), at least 1: how many frames each is behind; so many of its newest slots are empty then.
            envs: (m,): the environment of each empty slot that gets a frame; the others become zero.
            slots: (m,): that slot, 0 = oldest.
            new: (k, *frame_shape) on the CPU, or where the stacks are.
            source: (m,): which of ``new`` goes there.
        """
        new = new if new.device == self.data.device else to_device(new, self.data.device)
        where = EnvRows(len(self.data), self._there(ids), None)
        first, count = int(by[0]), len(self.data)
        alike = first in (1, self._length) and (by == first).all()
        if alike and np.array_equal(source, np.repeat(np.arange(len(ids)), by)):
            # one new frame each, as in every step that is read (moved and written in one pass), or in every slot
            fill = self._first if first == self._length else self._still
            self._frames.push(new, where, by=self._one, fill=fill)
            return
        if len(envs) < by.sum():
            lacking = ids[by > np.bincount(envs, minlength=count)[ids]]
            self.data.index_fill_(0, self._there(lacking), 0)
        if (by < self._length).any():
            steps = np.ones(count, np.int64)
            steps[ids] = by
            self._frames.push(None, where, by=self._there(steps), fill=self._still)
        self._frames.write(self._there(envs), self._there(slots), new, self._there(source))

    def newest(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the newest frames of environments ``ids`` (n,), (n, *frame_shape): fresh."""
        return self._frames.frames[self._there(ids), self._length - 1]

    def observe(self, ids: Tensor | None) -> Tensor:
        """Return the stacks of ``ids`` (n,), or of all, as last drawn: fresh."""
        return self._output.take(self.data, ids)

    def last(self, ids: Tensor) -> Tensor:
        """(N, …), fresh: the stacks of ``ids`` (m,) in their rows, and zeros in all others, which cost nothing."""
        shape, dtype = (self.data.shape[0], *self._output.shape), self._output.dtype
        nbytes = math.prod(shape) * dtype.itemsize
        if self.data.device.type == "cpu" and nbytes >= _SPARSE:
            memory = anonymous(nbytes, sparse=True)
            out = torch.from_numpy(memory).view(dtype).view(shape)
        else:
            out = torch.zeros(shape, dtype=dtype, device=self.data.device)
        self._output.put(self.data, ids, out)
        return out


def average_samples(frames: Tensor, samples: int) -> Tensor:
    """Return colors (n, s·H, s·W[, 3]) as (n, H, W[, 3]): the mean of each pixel's samples, rounded."""
    shape = frames.shape
    parts = frames.reshape(shape[0], shape[1] // samples, samples, shape[2] // samples, samples, *shape[3:])
    total = parts.sum((2, 4), dtype=torch.int32) + samples * samples // 2
    return (total // (samples * samples)).to(torch.uint8)


def there_on(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """Return numbers of the host as a tensor on a device."""
    return to_device(torch.from_numpy(numbers), device)
