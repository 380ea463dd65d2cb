"""Cameras as they are on a robot: late, slower than control, with pictures that stall, and noisy.

A sensor is a rule of which step's poses a picture shows. Everything random in it is a function of (seed, episode,
step), so that a picture drawn late is the one drawn at once.

The newest frames of every environment as they were last drawn, and what becomes of them in an observation.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._device import to_device
from headrace._kernels.compiled import helper, kernel, run
from headrace.envs._episode_state import EpisodeState
from headrace.envs.image_spec import ImageNoise, ImageSpec, lag_range
from headrace.history.ordered import OrderedFrames, StackOutput
from headrace.history.output import anonymous
from headrace.ids import EnvRows
from headrace.rng import random_bits, uniform
from headrace.types import StateDict

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
        # on the CPU the host's numbers are where they are needed
        self._there = torch.from_numpy if device.type == "cpu" else partial(there_on, device=device)
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
        new = new if new.device == self._frames.device else to_device(new, self._frames.device)
        where = EnvRows(self._frames.num_envs, self._there(ids), None)
        first, count = int(by[0]), self._frames.num_envs
        alike = first in (1, self._length) and (by == first).all()
        if alike and np.array_equal(source, np.repeat(np.arange(len(ids)), by)):
            # one new frame each, as in every step that is read, or in every slot
            self._frames.push(new, where, fill=self._first if first == self._length else self._still)
            return
        if len(envs) < by.sum():
            lacking = ids[by > np.bincount(envs, minlength=count)[ids]]
            self._frames.clear(EnvRows(count, self._there(lacking), None))
        self._frames.make_room(self._there(ids), self._there(by))
        self._frames.write(self._there(envs), self._there(slots), new, self._there(source))

    def copy(self) -> Tensor:
        """Return the frames, (N, …, K, …), oldest to newest: fresh."""
        return self._frames.take(EnvRows(self._frames.num_envs, None, None))

    def load(self, frames: Tensor) -> None:
        """Replace all frames by those of a :meth:`copy`."""
        self._frames.load(frames)

    def newest(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the newest frames of environments ``ids`` (n,), (n, *frame_shape): fresh."""
        slots = np.full(len(ids), self._length - 1)
        return self._frames.pick(self._there(ids), self._there(slots))

    def observe(self, ids: Tensor | None) -> Tensor:
        """Return the stacks of ``ids`` (n,), or of all, as last drawn: fresh."""
        return self._output.take(self._frames, ids)

    def last(self, ids: Tensor) -> Tensor:
        """(N, …), fresh: the stacks of ``ids`` (m,) in their rows, and zeros in all others, which cost nothing."""
        shape, dtype = (self._frames.num_envs, *self._output.shape), self._output.dtype
        nbytes = math.prod(shape) * dtype.itemsize
        if self._frames.device.type == "cpu" and nbytes >= _SPARSE:
            memory = anonymous(nbytes, sparse=True)
            out = torch.from_numpy(memory).view(dtype).view(shape)
        else:
            out = torch.zeros(shape, dtype=dtype, device=self._frames.device)
        self._output.put(self._frames, ids, out)
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


_I64 = NDArray[np.int64]
_SPREAD = 209.02153
"""Standard deviation of the sum of eight random bytes, whose mean is 1020."""
_VALUES = 1 << 14
"""Fewer values than this are not worth a thread."""


class Sensor:
    """When each environment's camera took what it shows: the delay, the stalls and the period of one image group.

    Owns the newest poses, float64 (N, R, S), from which the delayed ones are taken, and on the host each environment's
    lag and the number of its last step.
    """

    def __init__(self, spec: ImageSpec, num_envs: int, width: int) -> None:
        """Begin without poses; ``width`` is S."""
        self._lags, self._hold, self._period = lag_range(spec.delay), spec.hold, spec.period
        self._stream = f"sensor/{spec.camera.name}"
        self._room = self._lags[1] + self._period
        self.late = self._room > 1 or self._hold > 0
        """Whether pictures show anything but the newest poses."""
        self.rows = np.zeros((num_envs, self._room if self.late else 0, width))
        """(N, R, S): the noted poses."""
        self.time = np.zeros(num_envs, np.int64)
        self._lag = np.zeros(num_envs, np.int64)

    def take(
        self,
        envs: _I64,
        seen: NDArray[np.float64],
        held: NDArray[np.float64],
        stamps: _I64,
        begins: bool,
        episodes: EpisodeState,
    ) -> tuple[NDArray[np.float64], _I64]:
        """Note the poses of environments and return those that their cameras show now, with the steps they are of.

        Args:
            envs: (n,).
            seen: (n, S): the poses of this step.
            held: (n, S): what was shown in the step before.
            stamps: (n,): the step that ``held`` is of.
            begins: whether episodes begin.
            episodes: the episodes that the environments are in.
        """
        self.time[envs] = 0 if begins else self.time[envs] + 1
        time = self.time[envs]
        if not self.late:
            return seen, time
        ids = torch.from_numpy(episodes.episode_ids.cpu().numpy()[envs])
        if begins:
            low, high = self._lags
            unit = uniform(episodes.seed, ids, f"{self._stream}/delay", 1)[:, 0].numpy()
            self._lag[envs] = low + np.floor(unit * (high - low + 1)).astype(np.int64)
        self.rows[envs, time % self._room] = seen
        stamp = np.maximum(time - self._lag[envs], 0) // self._period * self._period
        shown = self.rows[envs, stamp % self._room]
        if self._hold and not begins:
            stalls = uniform(episodes.seed, ids, f"{self._stream}/hold", 1, draw=torch.from_numpy(time))[:, 0].numpy()
            stalled = stalls < self._hold
            stamp, shown = np.where(stalled, stamps, stamp), np.where(stalled[:, None], held, shown)
        return shown, stamp

    def state_dict(self) -> StateDict:
        """Poses, lags and times, as copies."""
        arrays = {"rows": self.rows, "time": self.time, "lag": self._lag}
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`."""
        self.rows = state["rows"].numpy().copy()
        self.time[:], self._lag[:] = state["time"].numpy(), state["lag"].numpy()


def add_noise(
    noise: ImageNoise,
    kind: str,
    frames: NDArray[np.generic],
    far: float,
    seed: int,
    ids: _I64,
    stamps: _I64,
    stream: str,
) -> None:
    """Add noise to frames (n, H, W, …) in place, by their episodes ``ids`` (n,) and steps ``stamps`` (n,)."""
    starts = random_bits(seed, torch.from_numpy(ids), stream, torch.from_numpy(stamps), 1).numpy()[:, 0]
    flat = frames.reshape(len(frames), -1)
    few = _VALUES // max(flat.shape[1], 1) + 1
    if kind == "depth":
        height, width = frames.shape[1:3]
        args = noise.additive, noise.depth_step, noise.edge_dropout, noise.edge, far, height, width
        run(disturb_depth, len(flat), flat, starts, *args, min_rows=few)
    else:
        channels = 3 if kind == "rgb" else 1
        run(disturb_colors, len(flat), flat, starts, noise.additive, noise.salt_and_pepper, channels, min_rows=few)


@helper
def next_bits(state: np.uint64) -> np.uint64:
    """Return SplitMix64's output for a state; the next state is this one and 0x9E3779B97F4A7C15."""
    value = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@helper
def bells(bits: np.uint64) -> tuple[np.float32, np.float32]:
    """Return two uncorrelated numbers of mean 0 and standard deviation ``_SPREAD``, nearly normal, from 64 bits.

    They are the sum and the difference of what the even and the odd half of the eight bytes add up to.
    """
    pairs = (bits & np.uint64(0x00FF00FF00FF00FF)) + ((bits >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF))
    both = pairs + (pairs >> np.uint64(16))
    low, high = np.int32(both & np.uint64(0xFFFF)), np.int32((both >> np.uint64(32)) & np.uint64(0xFFFF))
    return np.float32(low + high - np.int32(1020)), np.float32(low - high)


@helper
def color(value: np.float32) -> np.uint8:
    """Return the nearest color, halves up."""
    return np.uint8(np.int32(min(max(value + np.float32(0.5), np.float32(0)), np.float32(255))))


@kernel(checked_division=False)
def disturb_colors(
    start: int, stop: int, frames: NDArray[np.uint8], starts: _I64, std: float, share: float, channels: int
) -> None:
    """Add normal noise of ``std`` (of 255) to each value, and make a ``share`` of pixels black or white."""
    step, scale = np.uint64(0x9E3779B97F4A7C15), np.float32(std / _SPREAD)
    count, half = frames.shape[1], frames.shape[1] // 2
    # the distance to the next pixel that is black or white is drawn: a number for each of those alone
    rate = 1.0 / math.log1p(-min(share, 1.0))
    for i in range(start, stop):
        state, row = np.uint64(starts[i]), frames[i]
        if std > 0.0:
            for k in range(half):
                one, other = bells(next_bits(state + np.uint64(k + 1) * step))
                row[k] = color(np.float32(row[k]) + scale * one)
                row[half + k] = color(np.float32(row[half + k]) + scale * other)
            if count % 2:
                row[count - 1] = color(
                    np.float32(row[count - 1]) + scale * bells(next_bits(state + np.uint64(half + 1) * step))[0]
                )
        draw, pixel = np.uint64(count), -1.0
        while share > 0.0:
            draw += np.uint64(1)
            bits = next_bits(state + draw * step)
            pixel += 1.0 + math.floor(rate * math.log((np.float64(bits >> np.uint64(11)) + 1.0) * 2.0**-53))
            if not pixel * channels < count:  # nor a number at all, as for shares below any float's inverse
                break
            first = int(pixel) * channels
            row[first : first + channels] = np.uint8(255) if bits & np.uint64(1) else np.uint8(0)


@kernel(checked_division=False)
def disturb_depth(
    start: int,
    stop: int,
    frames: NDArray[np.float32],
    starts: _I64,
    std: float,
    unit: float,
    share: float,
    edge: float,
    far: float,
    height: int,
    width: int,
) -> None:
    """Lose a ``share`` of pixels beside a step of ``edge`` (relative), then add noise of ``std`` and round to ``unit``.

    What is lost, or was nowhere, is ``far``.
    """
    step, scale, most = np.uint64(0x9E3779B97F4A7C15), np.float32(std / _SPREAD), np.float32(far)
    limit = np.uint64(min(share, 1.0) * 4294967295.0)
    size = height * width
    lost = np.zeros(size, np.bool_)
    for i in range(start, stop):
        state, row = np.uint64(starts[i]), frames[i]
        if share > 0.0:
            for k in range(size):
                x, jump = k % width, np.float32(0)
                if k >= width:
                    jump = max(jump, abs(row[k - width] - row[k]))
                if k + width < size:
                    jump = max(jump, abs(row[k + width] - row[k]))
                if x > 0:
                    jump = max(jump, abs(row[k - 1] - row[k]))
                if x + 1 < width:
                    jump = max(jump, abs(row[k + 1] - row[k]))
                bits = next_bits(state + np.uint64(size + k + 1) * step)
                lost[k] = jump > np.float32(edge) * row[k] and bits >> np.uint64(32) < limit
        for k in range(size):
            value = row[k]
            if value < most:
                if std > 0.0:
                    value += scale * bells(next_bits(state + np.uint64(k + 1) * step))[0]
                if unit > 0.0:
                    value = np.float32(np.round(value / unit) * unit)
                row[k] = most if lost[k] else min(max(value, np.float32(0)), most)
