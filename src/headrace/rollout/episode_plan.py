"""Which episodes to play: each exactly once, handed to the next free slot at once."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.errors import ConfigError


class EpisodePlan:
    """Episode ids in order. Results do not lean to short episodes: every id is played to its end, none is skipped."""

    def __init__(self, episodes: int | Iterable[int]) -> None:
        """Plan episodes.

        Args:
            episodes: how many, with ids from 0; or the ids themselves.
        """
        self.ids = list(range(episodes)) if isinstance(episodes, int) else [int(episode) for episode in episodes]
        if not self.ids:
            raise ConfigError(f"episodes: expected at least one, got {episodes!r}")
        if min(self.ids) < 0 or len(set(self.ids)) != len(self.ids):
            raise ConfigError("episodes: expected ids of at least 0, each once; an episode is played exactly once")
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
