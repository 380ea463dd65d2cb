"""Which episodes to play: each exactly once, handed to the next free slot at once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from headrace.errors import ConfigError, DataError

_LARGEST = 2**63 - 1
_MOST = 10**8
"""More episodes than anybody plans: a file that says so is damaged."""


class EpisodePlan:
    """Episode ids in order. Results do not lean to short episodes: every id is played to its end, none is skipped."""

    def __init__(self, episodes: int | np.integer | Iterable[int]) -> None:
        """Plan episodes.

        Args:
            episodes: how many, with ids from 0; or the ids themselves.
        """
        counted = range(int(episodes)) if isinstance(episodes, int | np.integer) else episodes
        try:
            self.ids: Sequence[int] = (
                counted if isinstance(counted, range) else [operator.index(episode) for episode in counted]
            )
        except TypeError as error:
            raise ConfigError(f"episodes: expected a number of episodes, or their ids, got {episodes!r}") from error
        if not self.ids:
            raise ConfigError(f"episodes: expected at least one, got {episodes!r}")
        if isinstance(self.ids, range):
            repeated, lowest, largest = False, min(self.ids[0], self.ids[-1]), max(self.ids[0], self.ids[-1])
        else:
            repeated, lowest, largest = len(set(self.ids)) != len(self.ids), min(self.ids), max(self.ids)
        if lowest < 0 or repeated or largest > _LARGEST:
            outside = [i for i in self.ids if not 0 <= i <= _LARGEST]
            wrong = outside or [i for i in set(self.ids) if self.ids.count(i) > 1]
            raise ConfigError(
                f"episodes: expected ids from 0 to {_LARGEST}, each once, got {wrong[:8]}; an episode is played once"
            )
        self._next = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def left(self) -> int:
        """Episodes that no slot has taken yet."""
        return len(self.ids) - self._next

    def take(self, slots: Sequence[int]) -> list[int]:
        """The next ids, one for each of ``slots``; fewer at the end of the plan."""
        taken = list(self.ids[self._next : self._next + len(slots)])
        self._next += len(taken)
        return taken


class EndlessPlan:
    """Episodes without end: slot i plays i, i + N, i + 2N, …, as an environment that resets itself does."""

    ids: Sequence[int] = ()
    """Nobody waits for any of them."""

    def __init__(self, num_envs: int) -> None:
        self._next = list(range(num_envs))

    def __len__(self) -> int:
        return 0

    def take(self, slots: Sequence[int]) -> list[int]:
        """The next id of each of ``slots``."""
        taken = [self._next[slot] for slot in slots]
        for slot in slots:
            self._next[slot] += len(self._next)
        return taken


def ranges_of(ids: Iterable[int]) -> list[list[int]]:
    """Ids as ``[first, end)`` pairs in order: how files hold a plan."""
    found: list[list[int]] = []
    for episode in sorted(set(ids)):
        if found and found[-1][1] == episode:
            found[-1][1] += 1
        else:
            found.append([episode, episode + 1])
    return found


def ids_of(ranges: object, name: str) -> set[int]:
    """The ids of what :func:`ranges_of` gave; DataError, with ``name``, for anything else."""
    found: set[int] = set()
    for pair in cast("list[object]", ranges) if isinstance(ranges, list) else [ranges]:
        ends = cast("list[object]", pair) if isinstance(pair, list) else []
        if [type(end) for end in ends] != [int, int]:
            raise DataError(f"{name}: expected a plan of [first, end] pairs, got {ranges!r}")
        first, end = cast("list[int]", ends)
        if not 0 <= first < end or end - first > _MOST:
            raise DataError(f"{name}: expected a plan of [first, end] pairs, got {ranges!r}")
        found.update(range(first, end))
    return found
