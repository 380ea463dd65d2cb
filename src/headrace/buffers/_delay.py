"""Data that arrives late: sensors and actuators with a latency of whole steps."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace import _device
from headrace.buffers._circular import check_frames, check_lag
from headrace.buffers._storage import carried, lasting_zeros, load_tensors, stored_frames
from headrace.errors import ConfigError, DataError, IdError
from headrace.ids import EnvRows, check_rows, env_rows, over
from headrace.types import Ids, StateDict, as_device


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
        """Everything needed to go on bit-identically; copies. Before the first step there are no frames (None)."""
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
            from headrace._kernels.frames_warp import append_warp  # an extra, loaded on use

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
