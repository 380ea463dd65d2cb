"""Slots whose next episode is made ready in the background while the others step."""

from __future__ import annotations

import time
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.bridges.bridge_env import BridgeEnv


class BackgroundResets:
    """Which slots wait for which episodes. They play none meanwhile: the loop goes on without them."""

    def __init__(self, env: BridgeEnv) -> None:
        self._env = env
        self._episodes: dict[int, int] = {}
        self.held: NDArray[np.bool_] = np.zeros(env.num_envs, np.bool_)
        """bool (N,): slots that cannot act now, since a reset is under way in them or in their worker process."""

    def __len__(self) -> int:
        """How many slots wait."""
        return len(self._episodes)

    def begin(self, slots: NDArray[np.int64], episode_ids: NDArray[np.int64], patience: float) -> list[int]:
        """Begin episodes in ``slots`` (m,); gives those that are ready at once.

        A reset that takes no longer than a step, ``patience`` seconds, is waited for, so that slots that ended together
        begin together. Not where others are under way: then resets take longer.
        """
        mask = np.zeros(self._env.num_envs, np.bool_)
        mask[slots] = True
        deadline = 0.0 if self._episodes else time.monotonic() + patience
        self._env.begin_reset({"reset_mask": torch.from_numpy(mask), "episode_ids": torch.from_numpy(episode_ids)})
        self._episodes.update(zip(slots.tolist(), episode_ids.tolist(), strict=True))
        ready = self._ready(0.0)
        while len(ready) < len(slots) and (left := deadline - time.monotonic()) > 0:
            ready += self._ready(left)
        return ready

    def take(self, *, wait: bool) -> list[int]:
        """Slots that have become ready; waits for one where nobody else can go on."""
        return self._ready(None if wait else 0.0)

    def pop(self, slots: list[int]) -> NDArray[np.int64]:
        """Return the episodes (m,) that have begun in slots that are ready."""
        return np.array([self._episodes.pop(slot) for slot in slots], np.int64)

    def _ready(self, timeout: float | None) -> list[int]:
        found = cast("list[int]", self._env.finish_resets(timeout).tolist())
        self.held = self._env.resetting.cpu().numpy()
        return found
