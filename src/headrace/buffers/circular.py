"""The last few frames of every environment."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.buffers.ordered import OrderedFrames
from headrace.buffers.ring import RingFrames
from headrace.buffers.rows import EnvRows, check_rows, env_rows
from headrace.errors import ConfigError, DeviceError, DtypeError, IdError, LifecycleError, ShapeError
from headrace.types import Ids, as_device


class CircularBuffer:
    """The newest ``max_len`` rows of each of N environments, for data of any rank and dtype.

    Memory is allocated at the first append, which settles the shape and dtype of a frame. After a reset, the first
    append to an environment fills all its slots. Nothing here waits for the host on a GPU, given masks or indices
    that already live there.

    Rows and environments line up as everywhere in headrace: without ``env_ids`` rows are (N, …); with int64 indices
    they are compact (n, …), one per index; with a bool mask (N,) they are full (N, …) and rows outside it are ignored.

    Two layouts, chosen by ``stack_dim``. Without it an append writes one frame into a ring, and reading ``buffer``
    gathers a copy: right for long histories and for reading single lags. With it frames lie in memory from oldest to
    newest, an append moves the others down a slot, and ``buffer`` and ``stacked`` are views that cost nothing.

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
        self._pushed = torch.zeros(num_envs, dtype=torch.int64, device=self._device)
        self._step = torch.ones(num_envs, dtype=torch.int64, device=self._device)
        self._frame: tuple[tuple[int, ...], torch.dtype] | None = None
        self._ring: RingFrames | None = None
        self._ordered: OrderedFrames | None = None

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
        data = self._ring or self._ordered
        return 0 if data is None else data.data.nbytes

    def append(self, rows: Tensor, env_ids: Ids | None = None) -> None:
        """Add the newest frame of some environments; the others keep theirs, bit for bit.

        Args:
            rows: (N, …), or compact (n, …) with int64 ``env_ids``; copied.
            env_ids: the environments; None means all.
        """
        where = self._checked(rows, env_ids)
        if self._frame is None:
            self._allocate(rows)
        if self._ordered is not None:
            self._ordered.push(rows, where, by=self._step, fill=self._pushed == 0)
        elif self._ring is not None:
            self._ring.push(rows, where, self._pushed)
        where.add(self._pushed, 1)

    def reset(self, env_ids: Ids | None = None) -> None:
        """Forget some environments: their storage is zeroed, and no other's is touched."""
        where = env_rows(env_ids, num_envs=self._num_envs, device=self._device)
        where.fill(self._pushed, 0)
        data = self._ring or self._ordered
        if data is not None:
            where.fill(data.data, 0)

    @property
    def buffer(self) -> Tensor:
        """(N, K, …), oldest to newest. With ``stack_dim`` a view that the next append changes, else a copy.

        Environments that were reset and not appended to since are zeros.
        """
        if self._ordered is not None:
            return self._ordered.frames
        return self._filled_ring().ordered(self._pushed)

    @property
    def stacked(self) -> Tensor:
        """The frames merged into ``stack_dim``, oldest to newest: a contiguous view that the next append changes."""
        if self._stack_dim is None:
            raise ConfigError(
                "CircularBuffer.stacked: this buffer was made without stack_dim; construct it with "
                "stack_dim=<axis of the data to merge the frames into>, or read .buffer, which is (N, K, …)"
            )
        if self._ordered is None:
            raise _nothing_appended()
        return self._merged(self._ordered.data)

    def peek(self, rows: Tensor, env_ids: Ids | None = None) -> Tensor:
        """What ``stacked`` (without ``stack_dim``: ``buffer``) would be after ``append(rows, env_ids)``.

        Fresh; nothing changes. One row per given row; with a mask, rows outside it are as they are now.
        """
        where = self._checked(rows, env_ids)
        if self._frame is None:
            # allocating here would settle the shape of a frame: a side effect
            empty = CircularBuffer(self._max_len, self._num_envs, self._device, self._stack_dim)
            empty._allocate(rows)
            return empty.peek(rows, env_ids)
        fill = self._pushed == 0
        if self._ordered is not None:
            return self._merged(self._ordered.peek(rows, where, by=self._step, fill=fill))
        now = self._filled_ring().ordered(self._pushed)
        after = OrderedFrames(self._max_len, self._num_envs, self._frame[0], 0, self._frame[1], self._device)
        after.data = now
        return after.peek(rows, where, by=self._step, fill=fill)

    def __getitem__(self, lag: int | Tensor) -> Tensor:
        """The frames of ``lag`` appends ago (0 = newest), (N, …), fresh.

        A lag beyond what was appended since the reset gives the oldest frame since then. An int64 tensor (N,) gives
        each environment its own lag; its range is checked on the CPU only, elsewhere it is clamped.
        """
        lags = check_lag("lag", lag, self._max_len - 1, self._num_envs, self._device)
        if self._ordered is not None:
            reached = torch.minimum(lags, (self._pushed - 1).clamp(min=0)).clamp(min=0)
            envs = torch.arange(self._num_envs, device=self._device)
            return self._ordered.frames[envs, self._max_len - 1 - reached]
        return self._filled_ring().at(lags.clamp(min=0, max=self._max_len - 1), self._pushed)

    def __len__(self) -> int:
        """``max_len``: ``buf[lag]`` is defined below it."""
        return self._max_len

    def _checked(self, rows: Tensor, env_ids: Ids | None) -> EnvRows:
        where = env_rows(env_ids, num_envs=self._num_envs, device=self._device)
        check_rows("rows", rows, where, self._device)
        shape, dtype = tuple(rows.shape[1:]), rows.dtype
        if self._frame is not None:
            if shape != self._frame[0]:
                raise ShapeError(f"rows: expected frames of shape {self._frame[0]}, as at first, got {shape}")
            if dtype != self._frame[1]:
                raise DtypeError(f"rows: expected {self._frame[1]}, as at first, got {dtype}; convert with .to()")
            return where
        if 0 in shape:
            raise ShapeError(f"rows: expected frames with at least one element, got shape {shape}")
        if self._stack_dim is not None and not -len(shape) <= self._stack_dim <= len(shape):
            raise ShapeError(
                f"rows: stack_dim is {self._stack_dim}, but the data has {len(shape) + 1} axes, the batch axis 0 "
                f"among them; got shape {tuple(rows.shape)}"
            )
        return where

    def _allocate(self, rows: Tensor) -> None:
        shape, dtype = tuple(rows.shape[1:]), rows.dtype
        self._frame = shape, dtype
        if self._stack_dim is None:
            self._ring = RingFrames(self._max_len, self._num_envs, shape, dtype, self._device)
        else:
            axis = self._stack_dim - 1 if self._stack_dim > 0 else self._stack_dim + len(shape)
            self._ordered = OrderedFrames(self._max_len, self._num_envs, shape, axis, dtype, self._device)

    def _merged(self, data: Tensor) -> Tensor:
        assert self._ordered is not None
        return data.flatten(self._ordered.axis + 1, self._ordered.axis + 2)

    def _filled_ring(self) -> RingFrames:
        if self._ring is None:
            raise _nothing_appended()
        return self._ring


def check_lag(name: str, lag: int | Tensor, limit: int, rows: int, device: torch.device) -> Tensor:
    """``lag`` as int64 (rows,), refused where it is no integer from 0 to ``limit``.

    The values of a tensor on another device than the CPU are not looked at: that would wait for it.
    """
    if isinstance(lag, bool) or not isinstance(lag, (int, Tensor)):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may be untyped)
        raise DtypeError(f"{name}: expected an int or an int64 tensor, got {type(lag).__name__}")
    if isinstance(lag, int):
        if not 0 <= lag <= limit:
            raise IdError(f"{name}: expected 0 (the newest) to {limit}, got {lag}")
        return torch.full((rows,), lag, dtype=torch.int64, device=device)
    if lag.dtype != torch.int64:
        raise DtypeError(f"{name}: expected int64, got {lag.dtype}; lags are whole appends")
    if lag.device != device:
        raise DeviceError(f"{name}: expected a tensor on {device}, got one on {lag.device}; move it with .to()")
    if tuple(lag.shape) != (rows,):
        raise ShapeError(f"{name}: expected shape ({rows},), one lag per environment, got {tuple(lag.shape)}")
    if device.type == "cpu" and lag.numel() and (int(lag.min()) < 0 or int(lag.max()) > limit):
        raise IdError(f"{name}: expected 0 (the newest) to {limit}, got {int(lag.min())} to {int(lag.max())}")
    return lag


def _nothing_appended() -> LifecycleError:
    return LifecycleError(
        "CircularBuffer: nothing was appended yet, so the shape of a frame is not known; call append(rows) first"
    )
