"""Learning curves in TensorBoard files: the tags that each library writes, and reading them back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headrace.adapters._settings import LibraryName
from headrace.errors import DataError, require_extra


class CurveTags(NamedTuple):
    """Under which names a library writes its curves, and what it counts along their x axis."""

    reward: str
    length: str
    axis: Literal["iterations", "steps", "frames"]
    """``steps`` of the batch; ``frames`` are steps times environments."""


TAGS: Mapping[LibraryName, CurveTags] = {
    "headrace": CurveTags("Train/mean_reward", "Train/mean_episode_length", "iterations"),
    "rl_games": CurveTags("rewards/iter", "episode_lengths/iter", "iterations"),
    "rsl_rl": CurveTags("Train/mean_reward", "Train/mean_episode_length", "iterations"),
    "sb3": CurveTags("rollout/ep_rew_mean", "rollout/ep_len_mean", "frames"),
    "skrl": CurveTags("Reward / Total reward (mean)", "Episode / Total timesteps (mean)", "steps"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCurves:
    """The curves of one run, as its library logged them; n points."""

    at: list[int]
    """Where the points are, in what :attr:`CurveTags.axis` says."""
    reward: list[float]
    """Mean return of recent episodes, as the library averages."""
    length: list[float]


def read_curves(folder: Path, library: LibraryName) -> LoggedCurves:
    """The curves that a library logged below a folder; of several runs there, the newest.

    For runs that were made with the library itself. What ``headrace train`` learned is in ``training.json``.

    Args:
        folder: the log folder, or any above it: rl_games writes to ``summaries``, SB3 to ``PPO_1``, ``PPO_2``, ….
        library: whose tags to look for.
    """
    events: Any = require_extra(
        "tensorboard.backend.event_processing.event_accumulator", extra="tensorboard", purpose="reading curves"
    )
    tags = TAGS[library]
    files = sorted(folder.rglob("*tfevents*"), key=lambda file: (file.stat().st_mtime, file.name), reverse=True)
    seen: set[str] = set()
    for file in files:
        found = events.EventAccumulator(str(file), size_guidance={"scalars": 0})
        found.Reload()
        names = set(found.Tags()["scalars"])
        if {tags.reward, tags.length} <= names:
            reward, length = found.Scalars(tags.reward), found.Scalars(tags.length)
            return LoggedCurves(
                at=[point.step for point in reward],
                reward=[point.value for point in reward],
                length=[point.value for point in length],
            )
        seen |= names
    if not files:
        raise DataError(f"{folder}: expected TensorBoard files of {library} below it, got none")
    raise DataError(f"{folder}: expected the curve {tags.reward!r} of {library}, got {sorted(seen) or 'no curves'}")
