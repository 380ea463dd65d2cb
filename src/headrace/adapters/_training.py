"""The training loop of every library: iterate, count, keep checkpoints, stop when told to."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from headrace.adapters._checkpoint import read_weights
from headrace.adapters._learner import CheckpointMeta, Finished, Learner, Times
from headrace.adapters._library import library
from headrace.errors import ConfigError, DataError
from headrace.files import write_whole

INDEX = "checkpoint.json"
"""In the folder of a run: which checkpoints it has, and of what."""
STATE = "resume.pt"
"""Beside the last checkpoint: environment and random streams of the same moment."""
_RECENT = 100
_SHARE = 50.0
"""Checkpoints take at most one part in this of the time."""


class Iteration(NamedTuple):
    """One iteration, as the caller of :func:`train_iterations` is told."""

    number: int
    """From 1; a resumed training counts on."""
    times: Times
    finished: Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The checkpoints of a run."""

    task: str
    library: str
    last: Path
    best: Path
    iteration: int
    """Of the last one."""
    score: float | None
    best_score: float | None
    saved_at: float
    """Unix time of the last one."""


class CheckpointKeeper:
    """Saves a learner between iterations, often enough that a crash costs seconds, seldom enough to cost nothing.

    ``last`` is always of a whole iteration, and in place from before the first on; ``best`` has the highest mean return
    of the last 100 training episodes among those that were saved.
    """

    def __init__(self, folder: Path, learner: Learner, task: str, overrides: Mapping[str, object]) -> None:
        self.folder, self._learner, self._task, self._overrides = folder, learner, task, overrides
        suffix = library(learner.library).suffix
        self.last = folder / "checkpoints" / f"last{suffix}"
        self.best = folder / "checkpoints" / f"best{suffix}"
        self.kept: Kept | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._best_score: float | None = None
        self._due = 0.0

    @property
    def score(self) -> float | None:
        """Mean return of the last 100 episodes that ended."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    def note(self, iteration: int, finished: Finished) -> None:
        """An iteration is whole; save if it is time to."""
        self._recent.extend(finished.returns)
        if time.perf_counter() >= self._due:
            self.save(iteration)

    def save(self, iteration: int) -> None:
        """Write ``last``, and ``best`` where it is."""
        begin = time.perf_counter()
        score = self.score
        meta = CheckpointMeta(
            library=self._learner.library,
            task=self._task,
            iteration=iteration,
            score=score,
            settings=self._learner.settings,
            overrides=self._overrides,
        )
        self._learner.save(self.last, meta)
        state = {"iteration": iteration, "state": self._learner.state_dict()}
        write_whole(self.last.with_name(STATE), lambda part: torch.save(state, part))
        if self.kept is None or (score is not None and (self._best_score is None or score >= self._best_score)):
            self._learner.save(self.best, meta)
            self._best_score = score
        self.kept = Kept(
            task=self._task,
            library=self._learner.library,
            last=self.last,
            best=self.best,
            iteration=iteration,
            score=score,
            best_score=self._best_score,
            saved_at=time.time(),
        )
        write_whole(self.folder / INDEX, _index_text(self.kept))
        now = time.perf_counter()
        self._due = now + max(1.0, _SHARE * (now - begin))


def train_iterations(
    learner: Learner,
    keeper: CheckpointKeeper,
    iterations: int,
    on_iteration: Callable[[Iteration], bool],
    *,
    first: int = 0,
) -> int:
    """Train; returns the iterations that are done. Run it inside :func:`headrace.adapters.library_run`.

    Whatever is raised in an iteration goes on to the caller; the last checkpoint stays what it was before it.

    Args:
        learner: made by :func:`headrace.adapters.make_learner`.
        keeper: saves it.
        iterations: how many to do.
        on_iteration: told of each; True stops.
        first: iterations that were done before, where a training is resumed.
    """
    if iterations < 1:
        raise ConfigError(f"iterations: expected at least 1, got {iterations}")
    if not first:
        keeper.save(0)
    done = first
    for _ in range(iterations):
        times = learner.iterate()
        done += 1
        finished = learner.finished()
        keeper.note(done, finished)
        if on_iteration(Iteration(done, times, finished)):
            break
    keeper.save(done)
    return done


def resumable(run: Path, library: str) -> Kept:
    """The checkpoints of a run that ``library`` can go on from."""
    kept = read_index(run)
    if kept.library != library:
        raise DataError(f"{run}: expected a run of {library}, got one of {kept.library}; pass --library {kept.library}")
    return kept


def resume_from(learner: Learner, run: Path) -> int:
    """Put a learner where a run left off; returns the iterations it had done."""
    kept = resumable(run, learner.library)
    state = read_weights(kept.last.with_name(STATE), trust=False)
    if state["iteration"] != kept.iteration:
        raise DataError(f"{run}: its {STATE} is of iteration {state['iteration']}, not {kept.iteration}; it is damaged")
    learner.load(kept.last)
    learner.load_state_dict(state["state"])
    return kept.iteration


def read_index(run: Path) -> Kept:
    """The checkpoints of a run's folder."""
    try:
        found = json.loads((run / INDEX).read_text())
        return Kept(
            task=str(found["task"]),
            library=str(found["library"]),
            last=run / str(found["last"]),
            best=run / str(found["best"]),
            iteration=int(found["iteration"]),
            score=found["score"],
            best_score=found["best_score"],
            saved_at=float(found["saved_at"]),
        )
    except FileNotFoundError as error:
        raise DataError(f"{run}: expected the folder of a training, got one without {INDEX}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{run / INDEX}: cannot be read: {error!r}") from error


def _index_text(kept: Kept) -> str:
    folder = kept.last.parent.name
    content = {
        "task": kept.task,
        "library": kept.library,
        "last": f"{folder}/{kept.last.name}",
        "best": f"{folder}/{kept.best.name}",
        "iteration": kept.iteration,
        "score": kept.score,
        "best_score": kept.best_score,
        "saved_at": kept.saved_at,
    }
    return json.dumps(content, indent=2) + "\n"
