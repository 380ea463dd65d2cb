"""``CircularBuffer``: the last few frames of every environment, of any shape and dtype."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.errors import ConfigError, DataError, DeviceError, DtypeError, IdError, LifecycleError, ShapeError
from headrace.history.ordered import OrderedFrames
from headrace.history.output import carry_rows, lasting_zeros, load_tensors, read_stored_frames
from headrace.ids import EnvRows, check_rows, env_rows
from headrace.types import Ids, StateDict, as_device


class CircularBuffer:
    """The newest ``max_len`` rows of each of N environments, for data of any rank and dtype.

    Memory is allocated at the first append, which settles the shape and dtype of a frame. After a reset, the first
    append to an environment fills all its slots. Frames are copied without their history of gradients. Nothing here
    waits for the host on a GPU, given masks or indices that already live there.

    Rows and environments line up as everywhere in headrace: without ``env_ids`` rows are (N, …); with int64 indices
    they are compact (n, …), one per index; with a bool mask (N,) they are full (N, …) and rows outside it are ignored.

    An append copies one frame; ``buffer`` and ``stacked`` are views of one block that is brought up to date when they
    are read, and allocated at the first such read.

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
        self.max_len = max_len
        """K, the number of frames kept per environment."""
        self.num_envs = num_envs
        """N."""
        self.device = as_device(device)
        """Where the memory lives."""
        self._stack_dim = stack_dim
        self._pushed = lasting_zeros((num_envs,), torch.int64, self.device)
        self._frames: OrderedFrames | None = None
        self._dtype = torch.float32

    @property
    def lengths(self) -> Tensor:
        """int64 (N,), fresh: appends to each environment since its reset, at most ``max_len``."""
        return self._pushed.clamp(max=self.max_len)

    @property
    def nbytes(self) -> int:
        """Bytes of frames held; 0 before the first append."""
        return 0 if self._frames is None else self._frames.nbytes

    def append(self, rows: Tensor, env_ids: Ids | None = None) -> None:
        """Add the newest frame of some environments; the others keep theirs, bit for bit.

        Args:
            rows: (N, …), or compact (n, …) with int64 ``env_ids``; copied.
            env_ids: the environments; None means all.
        """
        where, data = self._check(rows, env_ids)
        if self._frames is None:
            self._frames, self._dtype = self._allocate(data), rows.dtype
        self._frames.push(data, where, fill=self._begins())
        where.add(self._pushed, 1)

    def reset(self, env_ids: Ids | None = None) -> None:
        """Forget some environments: their storage is zeroed, and no other's is touched."""
        where = env_rows(env_ids, num_envs=self.num_envs, device=self.device)
        where.fill(self._pushed, 0)
        if self._frames is not None:
            self._frames.clear(where)

    @property
    def buffer(self) -> Tensor:
        """(N, K, …), oldest to newest: a view of a block that reads after the next append change.

        Environments that were reset and not appended to since are zeros.
        """
        return self._require_filled().frames.view(self._dtype)

    def take(self, env_ids: Ids | None = None) -> Tensor:
        """Return what ``buffer`` is of some environments, (n, K, …), fresh; all rows with a mask."""
        where, frames = env_rows(env_ids, num_envs=self.num_envs, device=self.device), self._require_filled()
        return frames.take(where).movedim(frames.axis + 1, 1).view(self._dtype)

    @property
    def stacked(self) -> Tensor:
        """The frames merged into ``stack_dim``, oldest to newest: a contiguous view of the block of ``buffer``."""
        if self._stack_dim is None:
            raise ConfigError(
                "CircularBuffer.stacked: this buffer was made without stack_dim; construct it with "
                "stack_dim=<axis of the data to merge the frames into>, or read .buffer, which is (N, K, …)"
            )
        return self._merge_frames(self._require_filled()).view(self._dtype)

    def peek(self, rows: Tensor, env_ids: Ids | None = None) -> Tensor:
        """Return what ``stacked`` (without ``stack_dim``: ``buffer``) would be after ``append(rows, env_ids)``.

        Fresh; nothing changes. One row per given row; with a mask, rows outside it are as they are now.
        """
        where, data = self._check(rows, env_ids)
        # allocating for good would settle the shape of a frame: a side effect
        frames = self._allocate(data) if self._frames is None else self._frames
        after = frames.peek(data, where, fill=self._begins())
        return self._merge_frames(frames, after).view(rows.dtype)

    def __getitem__(self, lag: int | Tensor) -> Tensor:
        """Return the frames of ``lag`` appends ago (0 = newest), (N, …), fresh.

        A lag beyond what was appended since the reset, or beyond the buffer, gives the oldest frame since then. An
        int32 or int64 tensor (N,) gives each environment its own lag. Negative ones are refused on the CPU; elsewhere
        they are not looked at and mean the newest frame.
        """
        lags = _check_lag(lag, self.num_envs, self.device)
        reached = torch.minimum(lags, (self.lengths - 1)).clamp(min=0)
        envs = torch.arange(self.num_envs, device=self.device)
        return self._require_filled().pick(envs, self.max_len - 1 - reached).view(self._dtype)

    @property
    def pushed(self) -> Tensor:
        """int64 (N,), fresh: appends to each environment since its reset."""
        return self._pushed.clone()

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the frames of each lag, newest first."""
        return (self[lag] for lag in range(self.max_len))

    def __len__(self) -> int:
        """``max_len``."""
        return self.max_len

    def state_dict(self) -> StateDict:
        """Return everything needed to go on bit-identically; copies.

        Before the first append there are no frames (None).
        """
        kept = None if self._frames is None else self._frames.take(EnvRows(self.num_envs, None, None))
        return {"frames": None if kept is None else kept.view(self._dtype), "pushed": self._pushed.clone()}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from ``state_dict()`` of a buffer of the same sizes; anything else raises and changes nothing."""
        given = read_stored_frames(state)
        if given is None:
            load_tensors({"pushed": self._pushed}, state)
            self._frames = None
            return
        data = carry_rows(given)
        axis = self._slot_axis(data.dim() - 1)
        if data.shape[0] != self.num_envs or not 0 <= axis < data.dim() - 1 or data.shape[axis + 1] != self.max_len:
            raise DataError(
                f"frames: expected {self.num_envs} environments with {self.max_len} frames in axis {axis + 1}, got "
                f"shape {tuple(given.shape)}"
            )
        frames = self._allocate(data.select(axis + 1, 0))
        load_tensors({"pushed": self._pushed}, state)
        frames.load(data)
        self._frames, self._dtype = frames, given.dtype

    def _slot_axis(self, rank: int) -> int:
        """Before which axis of a frame of ``rank`` − 1 axes its K slots are."""
        if self._stack_dim is None:
            return 0
        return (self._stack_dim if self._stack_dim > 0 else self._stack_dim + rank) - 1

    def _begins(self) -> Tensor:
        """Return bool (N,): the next frame fills every slot."""
        return self._pushed == 0

    def _check(self, rows: Tensor, env_ids: Ids | None) -> tuple[EnvRows, Tensor]:
        """Return the environments that an append addresses, and the rows as they are stored."""
        where = env_rows(env_ids, num_envs=self.num_envs, device=self.device)
        check_rows("rows", rows, where, self.device)
        data = carry_rows(rows)
        _check_frames(rows, None if self._frames is None else self._frames.like.view(self._dtype))
        if self._stack_dim is not None and not -rows.dim() < self._stack_dim < rows.dim():
            raise ShapeError(
                f"rows: stack_dim is {self._stack_dim}, but the data has {rows.dim()} axes, the batch axis 0 among "
                f"them; got shape {tuple(rows.shape)}"
            )
        return where, data

    def _allocate(self, rows: Tensor) -> OrderedFrames:
        axis = self._slot_axis(rows.dim())
        return OrderedFrames(self.max_len, self.num_envs, tuple(rows.shape[1:]), axis, rows.dtype, self.device)

    def _merge_frames(self, frames: OrderedFrames, data: Tensor | None = None) -> Tensor:
        """Return ``data`` (the frames' own if None) as stacks; without ``stack_dim`` as (n, K, …)."""
        data = frames.data if data is None else data
        return data if self._stack_dim is None else data.flatten(frames.axis + 1, frames.axis + 2)

    def _require_filled(self) -> OrderedFrames:
        if self._frames is None:
            raise LifecycleError(
                "CircularBuffer: nothing was appended yet, so a frame has no shape yet; call append(rows) first"
            )
        return self._frames


def _check_lag(lag: int | Tensor, rows: int, device: torch.device) -> Tensor:
    """``lag`` as int64 (rows,), refused where it is no integer of 0 or more.

    The values of a tensor on another device than the CPU are not looked at: that would wait for it.
    """
    if isinstance(lag, bool) or not isinstance(lag, (int, Tensor)):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise DtypeError(f"lag: expected an int or a tensor of int32 or int64, got {type(lag).__name__}")
    lag = torch.full((rows,), lag, dtype=torch.int64, device=device) if isinstance(lag, int) else lag
    if lag.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"lag: expected int32 or int64, got {lag.dtype}; lags are whole appends")
    if lag.device != device:
        raise DeviceError(f"lag: expected a tensor on {device}, got one on {lag.device}; move it with .to()")
    if tuple(lag.shape) != (rows,):
        raise ShapeError(f"lag: expected shape ({rows},), one lag per environment, got {tuple(lag.shape)}")
    if device.type == "cpu" and lag.numel() and int(lag.min()) < 0:
        raise IdError(f"lag: expected 0 (the newest) or more, got {int(lag.min())}")
    return lag.to(torch.int64)


def _check_frames(rows: Tensor, held: Tensor | None) -> None:
    """Refuse rows whose frames differ in shape or dtype from those ``held`` (any rows, …), or have no elements."""
    shape = tuple(rows.shape[1:])
    if held is None:
        if 0 in shape:
            raise ShapeError(f"rows: expected frames with at least one element, got shape {shape}")
        return
    if shape != tuple(held.shape[1:]):
        raise ShapeError(f"rows: expected frames of shape {tuple(held.shape[1:])}, as at first, got {shape}")
    if rows.dtype != held.dtype:
        raise DtypeError(f"rows: expected {held.dtype}, as at first, got {rows.dtype}; convert with .to()")
