"""The bookkeeping of a batch: who acts, which episode each environment is in, how far, and what it has earned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._device import to_device
from headrace.errors import IdError
from headrace.ids import check_ids
from headrace.types import EpisodeEnds, Ids

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I64: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

_HOST = torch.device("cpu")
_NOTHING = np.empty(0, np.int64)
_NO_LIMIT = 2**62


class StepOutcome(NamedTuple):
    """What a step made of the rows that acted, as fresh tensors over all N environments."""

    reward: Tensor
    """float32 (N,)."""
    terminated: Tensor
    """bool (N,)."""
    truncated: Tensor
    """bool (N,)."""
    ended: Tensor
    """int64 (m,), on the host: the rows, not environments, whose episode ended."""
    diverged: Tensor
    """int64 (k,), on the host: those of them that ended because they diverged."""
    refused: bool = False
    """Whether a row's action was one that its space does not have; known here only on a GPU."""


class EpisodeState:
    """Per-environment bookkeeping; owns its tensors, all (N,) or (N, …) on one device.

    On the CPU a step's bookkeeping is a few calls of numpy, which are quicker than torch's on a handful of rows;
    elsewhere it is the torch operations beside them, which are also the reference in the tests.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device,
        memory: Mapping[str, tuple[int, ...]],
        episode_stride: int | None = None,
    ) -> None:
        self.seed = 0
        self.episode_stride = num_envs if episode_stride is None else episode_stride
        """From the id of an environment's episode to that of its next one."""
        self.num_envs = num_envs
        self.device = device
        self.all_ids = torch.arange(num_envs, device=device)
        self.episode_ids = torch.full((num_envs,), -1, dtype=torch.int64, device=device)
        self.next_ids = torch.arange(num_envs, device=device)
        """int64 (N,): the id that each environment's next episode gets, unless the caller names another."""
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.returns = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.memory = {
            name: torch.zeros((num_envs, *shape), dtype=torch.float64, device=device) for name, shape in memory.items()
        }
        self.field_views: dict[str, NDArray[Any]] = {}
        """Where rows keep numpy views of the simulation's fields, on the CPU."""
        # tests compare with the operations of torch by clearing it
        self._fused = device.type == "cpu"
        if self._fused:
            # views of the tensors above
            self._arrays = self.steps.numpy(), self.returns.numpy()

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the bookkeeping by name; the tensors themselves, not copies."""
        own = {"episode_ids": self.episode_ids, "next_ids": self.next_ids, "steps": self.steps, "returns": self.returns}
        return own | {f"memory.{name}": values for name, values in self.memory.items()}

    def advance(self, ids: Tensor | None) -> None:
        """Count one step for ``ids``, int64 (n,); None for all."""
        if ids is None:
            self.steps += 1
        else:
            self.steps.index_add_(0, ids, torch.ones_like(ids))

    def finish(
        self,
        ids: Tensor | None,
        reward: Tensor,
        terminated: Tensor,
        diverged: Tensor | None,
        limit: int = _NO_LIMIT,
        truncated: Tensor | None = None,
        refused: Tensor | None = None,
    ) -> StepOutcome:
        """Add rewards to returns and decide which episodes end.

        Args:
            ids: the environments that acted, int64 (n,); None for all.
            reward: float64 (n,); a diverged row earns nothing.
            terminated: bool (n,); a diverged row is truncated instead.
            diverged: bool (n,), or None for none.
            limit: steps after which an episode is truncated.
            truncated: bool (n,): episodes that were cut for another reason; None for none.
            refused: bool (n,): rows whose action was not fit; None for none.
        """
        ids = self.all_ids if ids is None else ids
        if self._fused:
            rows, (steps, returns) = ids.numpy(), self._arrays
            gain, over, cut = reward.numpy(), terminated.numpy(), steps[rows] >= limit
            cut = cut if truncated is None else cut | truncated.numpy()
            gone = _NOTHING
            if diverged is not None:
                lost = diverged.numpy()
                gain, over, cut, gone = np.where(lost, 0.0, gain), over & ~lost, cut | lost, np.flatnonzero(lost)
            returns[rows] += gain
            out, (all_over, all_cut) = np.zeros(self.num_envs, np.float32), np.zeros((2, self.num_envs), np.bool_)
            out[rows], all_over[rows], all_cut[rows] = gain, over, cut
            found = out, all_over, all_cut, np.flatnonzero(over | cut), gone
            return StepOutcome(*[torch.from_numpy(array) for array in found], refused=False)
        too_long = self.steps.index_select(0, ids) >= limit
        truncated = too_long if truncated is None else truncated | too_long
        if diverged is not None:
            reward = torch.where(diverged, 0.0, reward)
            terminated = terminated & ~diverged
            truncated = truncated | diverged
        self.returns.index_add_(0, ids, reward)
        flags = (terminated | truncated).to(torch.uint8)
        # a number times a bool would be eight bytes
        flags = flags if diverged is None else flags.add_(diverged.to(torch.uint8), alpha=2)
        flags = flags if refused is None else flags.add_(refused.to(torch.uint8), alpha=4)
        results = [self._scatter(ids, each) for each in (reward.to(torch.float32), terminated, truncated)]
        # what the host must know comes in one copy: the one wait of a step
        marks = flags.cpu().numpy()
        rows_marked = [torch.from_numpy(np.flatnonzero(marks & bit)) for bit in (1, 2)]
        return StepOutcome(*results, *rows_marked, refused=bool((marks & 4).any()))

    def ends(
        self, ids: Tensor, success: Tensor | None, diverged: Tensor | None
    ) -> tuple[EpisodeEnds, dict[str, Tensor], Tensor]:
        """Return what is known of the episodes that end in ``ids`` (m,): the record, ``r`` and ``l`` (N,), and the mask
        (N,).

        A diverged episode is never a success, whatever its broken state looks like.
        """
        gone = torch.zeros(ids.shape[0], dtype=torch.bool, device=self.device) if diverged is None else diverged
        mask = self._scatter(ids, torch.ones_like(gone))
        compact = [values.index_select(0, ids) for values in (self.episode_ids, self.returns, self.steps)]
        totals = {"r": torch.where(mask, self.returns, 0.0), "l": self.steps * mask}
        record = EpisodeEnds(
            env_ids=ids,
            episode_ids=compact[0],
            returns=compact[1],
            lengths=compact[2],
            success=success if success is None or diverged is None else success & ~diverged,
            diverged=gone,
        )
        return record, totals, mask

    def restart(self, seed: int) -> None:
        """Restart the numbering of episodes, under a new seed."""
        self.seed = seed
        self.next_ids.copy_(self.all_ids)

    def begin(self, ids: Tensor, episode_ids: Tensor | None) -> None:
        """Start an episode in each of ``ids`` (m,): the given ones, or those of ``next_ids``."""
        if episode_ids is None:
            episode_ids = self.next_ids.index_select(0, ids)
        self.episode_ids.index_copy_(0, ids, episode_ids)
        self.next_ids.index_copy_(0, ids, episode_ids + self.episode_stride)
        self.steps.index_fill_(0, ids, 0)
        for values in (self.returns, *self.memory.values()):
            values.index_fill_(0, ids, 0.0)

    def _scatter(self, ids: Tensor, values: Tensor) -> Tensor:
        full = torch.zeros(self.num_envs, dtype=values.dtype, device=self.device)
        full[ids] = values
        return full


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
        self._all_ids = np.arange(num_envs)
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
            return self._all_ids
        return self._host_ids.numpy()

    def rows_to_envs(self, rows: Tensor) -> Tensor:
        """Return the environments of active rows, both int64 (m,) on the host."""
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
        """Take note of new episodes."""
        if self._anyone_parked:
            self._masks[1][ids.cpu().numpy()] = False
            self.refresh()

    def refresh(self) -> None:
        """Follow a change of the masks."""
        self._stale = self._anyone_parked = True
