"""Which episodes to play: each exactly once, handed to the next free slot at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from headrace.errors import ConfigError


class EpisodePlan:
    """Episode ids in order. Results do not lean to short episodes: every id is played to its end, none is skipped."""

    def __init__(self, episodes: int | np.integer | Iterable[int]) -> None:
        """Plan episodes.

        Args:
            episodes: how many, with ids from 0; or the ids themselves.
        """
        counted = range(int(episodes)) if isinstance(episodes, int | np.integer) else episodes
        self.ids = [int(episode) for episode in counted]
        if not self.ids:
            raise ConfigError(f"episodes: expected at least one, got {episodes!r}")
        if min(self.ids) < 0 or len(set(self.ids)) != len(self.ids):
            wrong = [i for i in self.ids if i < 0] or [i for i in set(self.ids) if self.ids.count(i) > 1]
            raise ConfigError(
                f"episodes: expected ids of at least 0, each once, got {wrong[:8]}; an episode is played exactly once"
            )
        self._next = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def left(self) -> int:
        """Episodes that no slot has taken yet."""
        return len(self.ids) - self._next

    def take(self, count: int) -> list[int]:
        """The next ``count`` ids, fewer at the end of the plan."""
        taken = self.ids[self._next : self._next + count]
        self._next += len(taken)
        return taken
