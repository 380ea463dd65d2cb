"""The drawn stacks of a camera observation: what each environment showed last, kept once."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._device import to_device
from headrace.buffers._ordered import OrderedFrames
from headrace.buffers._pool import anonymous
from headrace.envs._image_spec import ImageSpec
from headrace.ids import EnvRows
from headrace.vision._stack_output import StackOutput

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
        self._output = StackOutput(
            spec.stack,
            shape,
            dtype,
            "last" if spec.layout == "channels_last" else "first",
            # numbers that are no colors were normalized frame by frame
            normalize=spec.normalize and spec.dtype == np.uint8,
        )
        self._length = spec.frames
        self._still, self._first = (torch.full((num_envs,), flag, device=device) for flag in (False, True))
        self._by, self._one = (torch.ones(num_envs, dtype=torch.int64, device=device) for _ in range(2))

    @property
    def data(self) -> Tensor:
        """The frames themselves, (N, …, K, …): the memory, not a copy."""
        return self._frames.data

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
        device = self.data.device
        new = new if new.device == device else to_device(new, device)
        rows = to_device(torch.from_numpy(ids), device)
        where = EnvRows(len(self._by), rows, None)
        if (by == 1).all() and np.array_equal(envs, ids) and np.array_equal(source, np.arange(len(new))):
            # one new frame each, as in every step that is read: move and write in one pass
            self._frames.push(new, where, by=self._one, fill=self._still)
            return
        if (by == self._length).all() and np.array_equal(source, np.repeat(np.arange(len(ids)), self._length)):
            # the first frame of an episode in every slot
            self._frames.push(new, where, by=self._one, fill=self._first)
            return
        places = to_device(torch.from_numpy(envs), device)
        if len(envs) < by.sum():
            lacking = ids[by > np.bincount(envs, minlength=len(self._by))[ids]]
            self.data.index_fill_(0, to_device(torch.from_numpy(lacking), device), 0)
        self._by.index_copy_(0, rows, to_device(torch.from_numpy(by), device))
        self._frames.push(None, where, by=self._by, fill=self._still)
        self._frames.write(
            places, to_device(torch.from_numpy(slots), device), new, to_device(torch.from_numpy(source), device)
        )

    def observe(self, ids: Tensor | None) -> Tensor:
        """The stacks of ``ids`` (n,), or of all, as last drawn: fresh."""
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
