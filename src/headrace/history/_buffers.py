"""The last few frames of every environment, and data that arrives late: both are rings of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace import _device
from headrace.errors import ConfigError, DataError, DeviceError, DtypeError, IdError, LifecycleError, ShapeError
from headrace.history.ordered import OrderedFrames
from headrace.history.output import carried, lasting_zeros, load_tensors, stored_frames
from headrace.ids import EnvRows, check_rows, env_rows, over
from headrace.types import Ids, StateDict, as_device


class CircularBuffer:
    """The newest ``max_len`` rows of each of N environments, for data of any rank and dtype.

    Memory is allocated at the first append, which settles the shape and dtype of a frame. After a reset, the first
    append to an environment fills all its slots. Frames are copied without their history of gradients. Nothing here
    waits for the host on a GPU, given masks or indices that already live there.

    Rows and environments line up as everywhere in headrace: without ``env_ids`` rows are (N, …); with int64 indices
    they are compact (n, …), one per index; with a bool mask (N,) they are full (N, …) and rows outside it are ignored.

    Frames lie in memory from oldest to newest and an append moves the others down a slot, so ``buffer`` and
    ``stacked`` are views that cost nothing. To read one late frame out of a long history, ``DelayBuffer`` is cheaper.

    Args:
        max_len: K, the number of frames kept per environment, at least 1.
        num_envs: N, at least 1.
        device: where the memory lives and where every tensor given must live.
        stack_dim: the axis of the appended data (N, …) that ``stacked`` merges the K frames into; negative counts
            from the end; the batch axis 0 is refused.
    """

    def __init__(
        self, max_len: int, num_envs: int, device: torch.device | str = "cpu", stack_dim: int | None = None
    ) -> None:
        for name, value in (("max_len", max_len), ("num_envs", num_envs)):
            if value < 1:
                raise ConfigError(f"CircularBuffer.{name}: expected at least 1, got {value}")
        if stack_dim == 0:
            raise ConfigError(
                "CircularBuffer.stack_dim: expected an axis of one environment's data, got 0, the batch axis; "
                "the first axis after it is 1, the last is -1"
            )
        self._max_len = max_len
        self._num_envs = num_envs
        self._device = as_device(device)
        self._stack_dim = stack_dim
        self._pushed = lasting_zeros((num_envs,), torch.int64, self._device)
        self._step = lasting_zeros((num_envs,), torch.int64, self._device).fill_(1)
        self._frames: OrderedFrames | None = None
        self._dtype = torch.float32

    @property
    def max_len(self) -> int:
        """K, the number of frames kept per environment."""
        return self._max_len

    @property
    def num_envs(self) -> int:
        """N."""
        return self._num_envs

    @property
    def device(self) -> torch.device:
        """Where the memory lives."""
        return self._device

    @property
    def lengths(self) -> Tensor:
        """int64 (N,), fresh: appends to each environment since its reset, at most ``max_len``."""
        return self._pushed.clamp(max=self._max_len)

    @property
    def nbytes(self) -> int:
        """Bytes of frames held; 0 before the first append."""
        return 0 if self._frames is None else self._frames.data.nbytes

    def append(self, rows: Tensor, env_ids: Ids | None = None) -> None:
        """Add the newest frame of some environments; the others keep theirs, bit for bit.

        Args:
            rows: (N, …), or compact (n, …) with int64 ``env_ids``; copied.
            env_ids: the environments; None means all.
        """
        where, data = self._checked(rows, env_ids)
        if self._frames is None:
            self._frames, self._dtype = self._allocated(data), rows.dtype
        self._frames.push(data, where, by=self._step, fill=self._pushed == 0)
        where.add(self._pushed, 1)

    def reset(self, env_ids: Ids | None = None) -> None:
        """Forget some environments: their storage is zeroed, and no other's is touched."""
        where = env_rows(env_ids, num_envs=self._num_envs, device=self._device)
        where.fill(self._pushed, 0)
        if self._frames is not None:
            where.fill(self._frames.data, 0)

    @property
    def buffer(self) -> Tensor:
        """(N, K, …), oldest to newest: a view that the next append changes.

        Environments that were reset and not appended to since are zeros.
        """
        return self._filled().frames.view(self._dtype)

    @property
    def stacked(self) -> Tensor:
        """The frames merged into ``stack_dim``, oldest to newest: a contiguous view that the next append changes."""
        if self._stack_dim is None:
            raise ConfigError(
                "CircularBuffer.stacked: this buffer was made without stack_dim; construct it with "
                "stack_dim=<axis of the data to merge the frames into>, or read .buffer, which is (N, K, …)"
            )
        return self._merged(self._filled()).view(self._dtype)

    def peek(self, rows: Tensor, env_ids: Ids | None = None) -> Tensor:
        """Return what ``stacked`` (without ``stack_dim``: ``buffer``) would be after ``append(rows, env_ids)``.

        Fresh; nothing changes. One row per given row; with a mask, rows outside it are as they are now.
        """
        where, data = self._checked(rows, env_ids)
        # allocating for good would settle the shape of a frame: a side effect
        frames = self._allocated(data) if self._frames is None else self._frames
        after = frames.peek(data, where, by=self._step, fill=self._pushed == 0)
        return self._merged(frames, after).view(rows.dtype)

    def __getitem__(self, lag: int | Tensor) -> Tensor:
        """Return the frames of ``lag`` appends ago (0 = newest), (N, …), fresh.

        A lag beyond what was appended since the reset, or beyond the buffer, gives the oldest frame since then. An
        int32 or int64 tensor (N,) gives each environment its own lag. Negative ones are refused on the CPU; elsewhere
        they are not looked at and mean the newest frame.
        """
        lags = check_lag("lag", lag, self._num_envs, self._device)
        frames = self._filled().frames
        reached = torch.minimum(lags, (self.lengths - 1)).clamp(min=0)
        envs = torch.arange(self._num_envs, device=self._device)
        return frames[envs, self._max_len - 1 - reached].view(self._dtype)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the frames of each lag, newest first."""
        return (self[lag] for lag in range(self._max_len))

    def __len__(self) -> int:
        """``max_len``."""
        return self._max_len

    def state_dict(self) -> StateDict:
        """Return everything needed to go on bit-identically; copies.

        Before the first append there are no frames (None).
        """
        frames = None if self._frames is None else self._frames.data.view(self._dtype).clone()
        return {"frames": frames, "pushed": self._pushed.clone()}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from ``state_dict()`` of a buffer of the same sizes; anything else raises and changes nothing."""
        given = stored_frames(state)
        if given is None:
            load_tensors({"pushed": self._pushed}, state)
            self._frames = None
            return
        data = carried(given, "frames")
        axis = self._slot_axis(data.dim() - 1)
        if data.shape[0] != self._num_envs or not 0 <= axis < data.dim() - 1 or data.shape[axis + 1] != self._max_len:
            raise DataError(
                f"frames: expected {self._num_envs} environments with {self._max_len} frames in axis {axis + 1}, got "
                f"shape {tuple(given.shape)}"
            )
        frames = self._allocated(data.select(axis + 1, 0))
        load_tensors({"frames": frames.data, "pushed": self._pushed}, {**state, "frames": data})
        self._frames, self._dtype = frames, given.dtype

    def _slot_axis(self, rank: int) -> int:
        """Before which axis of a frame of ``rank`` − 1 axes its K slots are."""
        if self._stack_dim is None:
            return 0
        return (self._stack_dim if self._stack_dim > 0 else self._stack_dim + rank) - 1

    def _checked(self, rows: Tensor, env_ids: Ids | None) -> tuple[EnvRows, Tensor]:
        """Return the environments, and the rows as they are stored."""
        where = env_rows(env_ids, num_envs=self._num_envs, device=self._device)
        check_rows("rows", rows, where, self._device)
        data = carried(rows, "rows")
        check_frames("rows", rows, None if self._frames is None else self._frames.frames[:, 0].view(self._dtype))
        if self._stack_dim is not None and not -rows.dim() < self._stack_dim < rows.dim():
            raise ShapeError(
                f"rows: stack_dim is {self._stack_dim}, but the data has {rows.dim()} axes, the batch axis 0 among "
                f"them; got shape {tuple(rows.shape)}"
            )
        return where, data

    def _allocated(self, rows: Tensor) -> OrderedFrames:
        axis = self._slot_axis(rows.dim())
        return OrderedFrames(self._max_len, self._num_envs, tuple(rows.shape[1:]), axis, rows.dtype, self._device)

    def _merged(self, frames: OrderedFrames, data: Tensor | None = None) -> Tensor:
        """Return ``data`` (the frames' own if None) as stacks; without ``stack_dim`` as (n, K, …)."""
        data = frames.data if data is None else data
        return data if self._stack_dim is None else data.flatten(frames.axis + 1, frames.axis + 2)

    def _filled(self) -> OrderedFrames:
        if self._frames is None:
            raise LifecycleError(
                "CircularBuffer: nothing was appended yet, so a frame has no shape yet; call append(rows) first"
            )
        return self._frames


def check_lag(name: str, lag: int | Tensor, rows: int, device: torch.device) -> Tensor:
    """``lag`` as int64 (rows,), refused where it is no integer of 0 or more.

    The values of a tensor on another device than the CPU are not looked at: that would wait for it.
    """
    if isinstance(lag, bool) or not isinstance(lag, (int, Tensor)):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise DtypeError(f"{name}: expected an int or a tensor of int32 or int64, got {type(lag).__name__}")
    if isinstance(lag, int):
        if lag < 0:
            raise IdError(f"{name}: expected 0 (the newest) or more, got {lag}")
        return torch.full((rows,), lag, dtype=torch.int64, device=device)
    if lag.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{name}: expected int32 or int64, got {lag.dtype}; lags are whole appends")
    if lag.device != device:
        raise DeviceError(f"{name}: expected a tensor on {device}, got one on {lag.device}; move it with .to()")
    if tuple(lag.shape) != (rows,):
        raise ShapeError(f"{name}: expected shape ({rows},), one lag per environment, got {tuple(lag.shape)}")
    if device.type == "cpu" and lag.numel() and int(lag.min()) < 0:
        raise IdError(f"{name}: expected 0 (the newest) or more, got {int(lag.min())}")
    return lag.to(torch.int64)


def check_frames(name: str, rows: Tensor, held: Tensor | None) -> None:
    """Refuse rows whose frames differ in shape or dtype from those ``held`` (any rows, …), or have no elements."""
    shape = tuple(rows.shape[1:])
    if held is None:
        if 0 in shape:
            raise ShapeError(f"{name}: expected frames with at least one element, got shape {shape}")
        return
    if shape != tuple(held.shape[1:]):
        raise ShapeError(f"{name}: expected frames of shape {tuple(held.shape[1:])}, as at first, got {shape}")
    if rows.dtype != held.dtype:
        raise DtypeError(f"{name}: expected {held.dtype}, as at first, got {rows.dtype}; convert with .to()")


class DelayBuffer:
    """Delays data by a whole number of steps per environment, 0 to ``max_lag``; lags are 0 at first.

    Data goes into a ring, so a step costs one write and one read however long the history is. A lag that reaches
    beyond the last reset gives the oldest data since then; memory is allocated at the first step. Data is kept, and
    given back, without its history of gradients.
    """

    def __init__(self, max_lag: int, num_envs: int, device: torch.device | str = "cpu") -> None:
        if max_lag < 0:
            raise ConfigError(f"DelayBuffer.max_lag: expected 0 or more, got {max_lag}")
        if num_envs < 1:
            raise ConfigError(f"DelayBuffer.num_envs: expected at least 1, got {num_envs}")
        self._max_lag = max_lag
        self._num_envs = num_envs
        self._device = as_device(device)
        self._lags = lasting_zeros((num_envs,), torch.int64, self._device)
        self._pushed = lasting_zeros((num_envs,), torch.int64, self._device)
        self._envs = torch.arange(num_envs, device=self._device)
        self._frames: Tensor | None = None
        """(N, max_lag + 1, …), a ring each, not in phase. The newest frame is in slot (pushed − 1) mod K."""
        self._dtype = torch.float32

    @property
    def max_lag(self) -> int:
        """The largest lag that may be set."""
        return self._max_lag

    @property
    def lags(self) -> Tensor:
        """int64 (N,): a copy of the lags in use."""
        return self._lags.clone()

    def set_lag(self, lag: int | Tensor, env_ids: Ids | None = None) -> None:
        """Set the lag of some environments; an invalid one raises and changes nothing.

        Args:
            lag: one int for all of them, or int32 or int64 with one lag per row (full with a mask, else compact).
                Values are checked on every device: setting lags is not part of the steady state.
            env_ids: the environments; None means all.
        """
        where = env_rows(env_ids, num_envs=self._num_envs, device=self._device)
        lags = check_lag("lag", lag, where.row_count, self._device)
        if bool(((lags < 0) | (lags > self._max_lag)).any()):
            raise IdError(f"lag: expected 0 (no delay) to {self._max_lag}, got {int(lags.min())} to {int(lags.max())}")
        where.write(self._lags, lags)

    def reset(self, env_ids: Ids | None = None) -> None:
        """Forget the data of some environments; lags stay."""
        where = env_rows(env_ids, num_envs=self._num_envs, device=self._device)
        where.fill(self._pushed, 0)
        if self._frames is not None:
            where.fill(self._frames, 0)

    def compute(self, rows: Tensor, env_ids: Ids | None = None) -> Tensor:
        """Append the data of this step and return the delayed data, (N, …), fresh.

        Environments that are not addressed keep their history and give the same data as before.
        """
        where = env_rows(env_ids, num_envs=self._num_envs, device=self._device)
        check_rows("rows", rows, where, self._device)
        data = carried(rows, "rows")
        check_frames("rows", rows, None if self._frames is None else self._frames[:, 0].view(self._dtype))
        if self._frames is None:
            self._frames, self._dtype = self._allocated(data.shape[1:], data.dtype), rows.dtype
        self._push(self._frames, data, where)
        where.add(self._pushed, 1)
        # an environment that was not appended to since its reset gives zeros
        reached = torch.minimum(self._lags, (self._pushed - 1).clamp(min=0))
        slots = (self._pushed - 1 - reached) % (self._max_lag + 1)
        return self._frames[self._envs, slots].view(self._dtype)

    def state_dict(self) -> StateDict:
        """Return everything needed to go on bit-identically; copies.

        Before the first step there are no frames (None).
        """
        frames = None if self._frames is None else self._frames.view(self._dtype).clone()
        return {"frames": frames, "pushed": self._pushed.clone(), "lags": self._lags.clone()}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from ``state_dict()`` of a buffer of the same sizes; anything else raises and changes nothing."""
        given = stored_frames(state)
        own = {"pushed": self._pushed, "lags": self._lags}
        if given is None:
            load_tensors(own, state)
            self._frames = None
            return
        if tuple(given.shape[:2]) != (self._num_envs, self._max_lag + 1):
            raise DataError(f"frames: expected ({self._num_envs}, {self._max_lag + 1}, …), got {tuple(given.shape)}")
        data = carried(given, "frames")
        frames = self._allocated(data.shape[2:], data.dtype)
        load_tensors({**own, "frames": frames}, {**state, "frames": data})
        self._frames, self._dtype = frames, given.dtype

    def _allocated(self, frame_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return lasting_zeros((self._num_envs, self._max_lag + 1, *frame_shape), dtype, self._device)

    def _push(self, frames: Tensor, rows: Tensor, where: EnvRows) -> None:
        """Write ``rows`` (row_count, …) as the newest frames."""
        length = self._max_lag + 1
        if _device.has_warp(self._device):
            from headrace.history._warp import append_warp  # an extra, loaded on use

            append_warp(frames, rows, where.ids, where.mask, self._pushed, length=length)
            return
        slot = self._pushed % length
        if where.mask is None:
            envs = where.select(self._envs)
            frames[envs, slot[envs]] = rows
        elif where.ids is not None:
            frames[where.ids, slot[where.ids]] = rows[where.ids]
        else:
            held = frames[self._envs, slot]
            frames[self._envs, slot] = torch.where(over(where.mask, rows), rows, held)
