"""Who acts: the suspended, the parked, and the rest."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._device import to_device
from headrace.errors import IdError
from headrace.ids import check_ids
from headrace.types import Ids

_HOST = torch.device("cpu")


class ActiveSet:
    """Which of N environments the next step advances; owns its masks, which are kept on the host whatever the device.

    ``suspended`` is the caller's wish, ``parked`` an ended episode that waits for its reset. Both are bool (N,), CPU.
    """

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self._num_envs = num_envs
        self._device = device
        self.suspended = torch.zeros(num_envs, dtype=torch.bool)
        self.parked = torch.zeros(num_envs, dtype=torch.bool)
        # views: numpy is quicker than torch on a handful of flags
        self._masks = self.suspended.numpy(), self.parked.numpy()
        self._anyone_parked = self._stale = False
        self._everyone = np.arange(num_envs)
        self._ids: Tensor | None = None
        self._host_ids: Tensor | None = None

    @property
    def ids(self) -> Tensor | None:
        """int64 (n,), ascending: the active environments; None when all are, for which every stage has a short way."""
        if self._stale:
            suspended, parked = self._masks
            ids = np.flatnonzero(~(suspended | parked))
            self._host_ids = None if len(ids) == self._num_envs else torch.from_numpy(ids)
            self._ids = None if self._host_ids is None else to_device(self._host_ids, self._device)
            self._anyone_parked, self._stale = bool(parked.any()), False
        return self._ids

    @property
    def rows(self) -> NDArray[np.int64]:
        """:attr:`ids` on the host, also when all are active. Do not write into it."""
        if self.ids is None or self._host_ids is None:
            return self._everyone
        return self._host_ids.numpy()

    def rows_to_envs(self, rows: Tensor) -> Tensor:
        """The environments of active rows, both int64 (m,) on the host."""
        return rows if self._host_ids is None else self._host_ids.index_select(0, rows)

    @property
    def active(self) -> Tensor:
        """bool (N,), a copy."""
        return to_device(~(self.suspended | self.parked), self._device)

    def suspend(self, ids: Ids) -> None:
        """Freeze environments. Suspending one twice is a no-op."""
        self.suspended[check_ids(ids, self._num_envs, _HOST)] = True
        self.refresh()

    def resume(self, ids: Ids) -> None:
        """Let suspended environments act again. Resuming one that is active is a no-op."""
        rows = check_ids(ids, self._num_envs, _HOST)
        ended = rows[self.parked[rows]]
        if len(ended):
            raise IdError(
                f"resume: environment {int(ended[0])} has ended its episode and cannot act; "
                'start a new one with reset(options={"reset_mask": mask})'
            )
        self.suspended[rows] = False
        self.refresh()

    def park(self, ids: Tensor) -> None:
        """Keep environments whose episode ended from acting until :meth:`unpark`."""
        self._masks[1][ids.cpu().numpy()] = True
        self.refresh()

    def unpark(self, ids: Tensor) -> None:
        """Environments have begun new episodes."""
        if self._anyone_parked:
            self._masks[1][ids.cpu().numpy()] = False
            self.refresh()

    def refresh(self) -> None:
        """Follow a change of the masks."""
        self._stale = self._anyone_parked = True
