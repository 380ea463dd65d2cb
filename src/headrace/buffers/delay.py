"""Data that arrives late: sensors and actuators with a latency of whole steps."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.buffers.circular import CircularBuffer, check_lag
from headrace.buffers.rows import env_rows
from headrace.errors import ConfigError, IdError
from headrace.types import Ids


class DelayBuffer:
    """Delays data by a whole number of steps per environment, 0 to ``max_lag``; lags are 0 at first.

    A lag that reaches beyond the last reset gives the oldest data since then.
    """

    def __init__(self, max_lag: int, num_envs: int, device: torch.device | str = "cpu") -> None:
        if max_lag < 0:
            raise ConfigError(f"DelayBuffer.max_lag: expected 0 or more, got {max_lag}")
        self._frames = CircularBuffer(max_lag + 1, num_envs, device)
        self._lags = torch.zeros(num_envs, dtype=torch.int64, device=self._frames.device)
        self._max_lag = max_lag

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
            lag: one int for all of them, or int64 with one lag per row (full with a mask, else compact). Values are
                checked on every device: setting lags is not part of the steady state.
            env_ids: the environments; None means all.
        """
        where = env_rows(env_ids, num_envs=self._frames.num_envs, device=self._frames.device)
        lags = check_lag("lag", lag, self._max_lag, where.row_count, self._frames.device)
        if bool(((lags < 0) | (lags > self._max_lag)).any()):
            raise IdError(f"lag: expected 0 (no delay) to {self._max_lag}, got {int(lags.min())} to {int(lags.max())}")
        where.write(self._lags, lags)

    def reset(self, env_ids: Ids | None = None) -> None:
        """Forget the data of some environments; lags stay."""
        self._frames.reset(env_ids)

    def compute(self, rows: Tensor, env_ids: Ids | None = None) -> Tensor:
        """Append the data of this step and return the delayed data, (N, …), fresh.

        Environments that are not addressed keep their history and give the same data as before.
        """
        self._frames.append(rows, env_ids)
        return self._frames[self._lags]
