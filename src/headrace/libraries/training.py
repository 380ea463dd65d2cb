"""The training loop of every library: iterate, count, keep checkpoints, stop when told to."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace._interrupts import delayed
from headrace.envs.recipe import EnvRecipe
from headrace.errors import ConfigError, DataError
from headrace.files import write_whole
from headrace.learning.ppo import PPOCfg
from headrace.libraries.checkpoint import CheckpointMeta, plain, read_meta, read_weights
from headrace.libraries.learner import Learner, Times
from headrace.libraries.registry import library
from headrace.types import EpisodeEnds

INDEX = "checkpoint.json"
"""In the directory of a run: which checkpoints it has, and of what."""
CHECKPOINTS = "checkpoints"
"""In the directory of a run: they are in here."""
STATE = "resume-{}.pt"
"""Next to the last checkpoint: environment and random streams of the same iteration, which is in its name."""
_RECENT = 100
_SHARE = 50.0
"""Checkpoints take at most one part in this of the time."""


class Iteration(NamedTuple):
    """One iteration, as the caller of :func:`train_iterations` is told."""

    number: int
    """From 1; a resumed training counts on."""
    times: Times
    finished: EpisodeEnds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The checkpoints of a run."""

    task: str
    library: str
    num_envs: int
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

    def __init__(self, directory: Path, learner: Learner, recipe: EnvRecipe, *, resumable: bool = True) -> None:
        """Prepare; nothing is written yet.

        Args:
            directory: of the run.
            learner: to save.
            recipe: of the environments that it learns on.
            resumable: False for environments whose state cannot be saved as plain numbers.
        """
        self.directory, self._learner, self._recipe, self._resumable = directory, learner, recipe, resumable
        suffix = library(learner.library).suffix
        self.last = directory / CHECKPOINTS / f"last{suffix}"
        self.best = directory / CHECKPOINTS / f"best{suffix}"
        self.kept: Kept | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._best_score: float | None = None
        self._due = 0.0

    def note(self, iteration: int, finished: EpisodeEnds) -> None:
        """Count a whole iteration, and save if it is time to."""
        self._recent.extend(finished.returns.tolist())
        if time.perf_counter() >= self._due:
            self.save(iteration)

    def save(self, iteration: int) -> None:
        """Write ``last``, and ``best`` where it is.

        The state to resume from is written before ``last`` and under the iteration's own name: at any moment, also
        after a crash or on a full disk, ``last`` has its state next to it.
        """
        if self.kept is not None and self.kept.iteration == iteration:
            return
        begin = time.perf_counter()
        score = sum(self._recent) / len(self._recent) if self._recent else None
        meta = CheckpointMeta(
            library=self._learner.library,
            task=self._recipe.source,
            iteration=iteration,
            score=score,
            settings=self._learner.settings,
            overrides=self._recipe.overrides,
        )
        state = self._state(iteration)
        self._learner.save(self.last, meta)
        for old in self.last.parent.glob(STATE.format("*")):
            if old != state:
                old.unlink()
        if self.kept is None or (score is not None and (self._best_score is None or score >= self._best_score)):
            self._learner.save(self.best, meta)
            self._best_score = score
        self.kept = Kept(
            task=self._recipe.source,
            library=self._learner.library,
            num_envs=self._recipe.num_envs,
            last=self.last,
            best=self.best,
            iteration=iteration,
            score=score,
            best_score=self._best_score,
            saved_at=time.time(),
        )
        paths = {"last": f"{CHECKPOINTS}/{self.last.name}", "best": f"{CHECKPOINTS}/{self.best.name}"}
        write_whole(self.directory / INDEX, json.dumps(asdict(self.kept) | paths, indent=2) + "\n")
        now = time.perf_counter()
        self._due = now + max(1.0, _SHARE * (now - begin))

    def _state(self, iteration: int) -> Path | None:
        """Write what resuming needs; None where the environment cannot be saved, or only as a pickle."""
        if not self._resumable:
            return None
        path = self.last.with_name(STATE.format(iteration))
        content = {"iteration": iteration, "state": self._learner.state_dict()}
        write_whole(path, lambda part: torch.save(content, part))
        return path


def train_iterations(
    learner: Learner,
    keeper: CheckpointKeeper,
    iterations: int,
    on_iteration: Callable[[Iteration], bool],
    *,
    first: int = 0,
) -> int:
    """Train; returns the iterations that are done. Run it inside :func:`headrace.libraries.library_run`.

    Ctrl-C, and any other signal that has a handler, takes effect when the iteration under way is whole and saved;
    a second one at once. Whatever ``on_iteration`` raises goes on to the caller when that iteration is saved. Whatever
    an iteration itself raises goes on at once, since its networks and environments are between two states: the last
    checkpoint stays what it was, at most a second old or fifty times what saving takes.

    Args:
        learner: made by :func:`headrace.libraries.make_learner`.
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
    with delayed() as came:
        for _ in range(iterations):
            times = Times(*learner.iterate())
            done += 1
            finished = learner.finished()
            keeper.note(done, finished)
            try:
                stop = on_iteration(Iteration(done, times, finished))
            except BaseException:  # raised again
                keeper.save(done)
                raise
            if stop or came:
                break
        keeper.save(done)
    return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A run to continue, found to be of the same library and task."""

    last: Path
    meta: CheckpointMeta
    state: Path

    def changed(self, settings: PPOCfg, overrides: Mapping[str, object]) -> dict[str, Any]:
        """Return what differs from the settings that the run had: name → [before, now]."""
        before, now = _described(self.meta.settings, self.meta.overrides), _described(settings, overrides)
        return {name: [before.get(name), now.get(name)] for name in before | now if before.get(name) != now.get(name)}


def _described(settings: PPOCfg, overrides: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings of PPO, and of the task as ``task.NAME``, as JSON has them."""
    return plain(asdict(settings) | {f"task.{name}": value for name, value in overrides.items()})


def resumable(run: Path, library_name: str, task: str, num_envs: int) -> Resumption:
    """Return the checkpoint of a run that ``library_name`` can continue on ``task``; nothing is loaded or written."""
    kept = read_index(run)
    if kept.num_envs != num_envs:
        raise ConfigError(
            f"{run}: its {kept.num_envs} environments are part of its state, got {num_envs}; resume it with "
            f"num_envs={kept.num_envs} (--num-envs {kept.num_envs})"
        )
    if kept.library != library_name:
        raise DataError(
            f"{run}: expected a run of {library_name}, got one of {kept.library}; pass --library {kept.library}"
        )
    meta = read_meta(kept.last, library(library_name))
    if meta is None:
        raise DataError(
            f"{kept.last}: expected a checkpoint that 'headrace train' wrote, got one without a description"
        )
    if meta.task != task:
        raise DataError(f"{run}: expected a run of task {task!r}, got one of {meta.task!r}; resume it with that task")
    state = kept.last.with_name(STATE.format(meta.iteration))
    if not state.is_file():
        raise DataError(
            f"{run}: it has no {state.name}, so it cannot be resumed; runs of bridged environments keep none, as their "
            "state is a pickle"
        )
    return Resumption(last=kept.last, meta=meta, state=state)


def recorded_settings(run: Path) -> PPOCfg:
    """Return the settings of PPO that an earlier training had."""
    kept = read_index(run)
    meta = read_meta(kept.last, library(kept.library))
    if meta is None:
        raise DataError(
            f"{kept.last}: expected a checkpoint that 'headrace train' wrote, got one without a description"
        )
    return meta.settings


def load_resumption(learner: Learner, resumption: Resumption) -> int:
    """Put a learner where a run left off; returns the iterations it had done."""
    state = read_weights(resumption.state, trust=False)
    learner.load(resumption.last)
    learner.load_state_dict(state["state"])
    return resumption.meta.iteration


def read_index(run: Path) -> Kept:
    """Return the checkpoints of a run's directory."""
    try:
        found = json.loads((run / INDEX).read_text())
        return Kept(
            task=str(found["task"]),
            library=str(found["library"]),
            num_envs=int(found["num_envs"]),
            last=run / str(found["last"]),
            best=run / str(found["best"]),
            iteration=int(found["iteration"]),
            score=found["score"],
            best_score=found["best_score"],
            saved_at=float(found["saved_at"]),
        )
    except FileNotFoundError as error:
        raise DataError(f"{run}: expected the directory of a training, got one without {INDEX}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{run / INDEX}: cannot be read: {error!r}") from error
