"""Learning curves that a library wrote to TensorBoard files, read back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.adapters._library import library
from headrace.errors import DataError, require_extra


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCurves:
    """The curves of one run, as its library logged them; n points."""

    at: list[int]
    """Where the points are, counted in what :attr:`headrace.adapters.CurveTags.axis` says."""
    reward: list[float]
    """Mean return of recent episodes, as the library averages."""
    length: list[float]


def read_curves(directory: Path, library_name: str) -> LoggedCurves:
    """The curves that a library logged below a directory; of several runs there, the newest.

    For runs that were made with the library itself. What ``headrace train`` learned is in ``training.json``.

    Args:
        directory: the log directory, or any above it: rl_games writes to ``summaries``, SB3 to ``PPO_1``, ``PPO_2``, ….
        library_name: whose tags to look for.
    """
    events: Any = require_extra(
        "tensorboard.backend.event_processing.event_accumulator", extra="tensorboard", purpose="reading curves"
    )
    tags = library(library_name).curves
    files = sorted(directory.rglob("*tfevents*"), key=lambda file: (file.stat().st_mtime, file.name), reverse=True)
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
        raise DataError(f"{directory}: expected TensorBoard files of {library_name} below it, got none")
    raise DataError(
        f"{directory}: expected the curve {tags.reward!r} of {library_name}, got {sorted(seen) or 'no curves'}"
    )
