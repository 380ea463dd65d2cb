"""The recorder: watches an environment and keeps every finished episode."""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._leaves import flatten
from headrace.errors import ConfigError, DataError, LifecycleError
from headrace.files import Owner
from headrace.recording._episode_file import EpisodeFile, EpisodeMeta
from headrace.recording._store import DatasetInfo, EpisodeStore
from headrace.recording._writer import BackgroundWriter
from headrace.recording.fields import TEXT, as_array, check_choice, first_difference, is_text, needs_frames
from headrace.recording.running import FieldSources, FinishedEpisode, RunningRows, Told
from headrace.types import Need, ResetRecord, StepRecord, SubstepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderCfg:
    """What to record and what to keep."""

    fields: tuple[str, ...] = ("obs", "actions", "rewards", "flags")
    """``obs`` (every group), ``obs/<group>``, ``cameras`` (every image group), ``cameras/<group>``, ``actions``,
    ``processed_actions``, ``rewards``, ``flags``, ``states`` (physics states, which replay compares), ``substeps``
    (physics states after every physics substep of a step)."""
    keep: Literal["all", "succeeded"] = "all"
    """``succeeded`` keeps no others."""
    min_length: int = 1
    """Shorter episodes are not kept."""
    queue_episodes: int | None = None
    """Finished episodes that may not be on disk yet when a step returns; the number of environments where None."""
    commit_within_s: float = 1.0
    """Seconds after which a finished episode is on disk when a step returns; a step waits for those that are not."""
    stall_s: float = 60.0
    """Seconds without progress after which a call that waits for the disk raises an error."""

    def __post_init__(self) -> None:
        check_choice(self.fields)
        if self.keep not in ("all", "succeeded"):
            raise ConfigError(f"keep: expected 'all' or 'succeeded', got {self.keep!r}")
        if self.min_length < 1:
            raise ConfigError(f"min_length: expected at least 1, got {self.min_length}")
        if self.queue_episodes is not None and self.queue_episodes < 1:
            raise ConfigError(f"queue_episodes: expected at least 1, got {self.queue_episodes}")
        for name in ("commit_within_s", "stall_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: expected more than 0 seconds, got {getattr(self, name)}")


@dataclass(slots=True, kw_only=True)
class RecorderReport:
    """What became of the episodes of this run."""

    finished: int = 0
    """Episodes that ended and were handed to the writer."""
    too_short: int = 0
    not_kept: int = 0
    """Failed episodes, where only succeeded ones are kept."""
    already_there: int = 0
    """Episodes that the resumed dataset had: same seed, id and attempt."""
    begun_before: int = 0
    """Episodes that were running when the recorder was attached; their beginning is unknown."""
    abandoned: int = 0
    """Episodes that a reset or the end of the run cut short."""
    waited_s: float = 0.0
    """Time that steps waited for the disk."""


class EpisodeRecorder:
    """Keeps every finished episode of the environment it is attached to, on disk, safe against a crash.

    Attach it with ``env.attach(recorder)``, or feed it records. Close it, or use it as a context manager: on errors and
    on Ctrl-C the finished episodes still reach the disk. It copies what it keeps; the records stay the environment's.

    Args:
        path: dataset directory. It must be new or empty, unless ``resume``.
        cfg: what to record and keep.
        info: where the episodes come from.
        resume: go on after the committed episodes, which are verified first. Episodes that the dataset already has
            (same seed, episode id and attempt) are not written again, so that running the same program again completes
            what a crash cut short.
    """

    def __init__(
        self, path: Path | str, cfg: RecorderCfg | None = None, info: DatasetInfo | None = None, *, resume: bool = False
    ) -> None:
        self.cfg = cfg or RecorderCfg()
        wanted: dict[Need, bool] = {name: name in self.cfg.fields for name in ("states", "substeps")}
        wanted["frames"] = needs_frames(self.cfg.fields)
        self.needs: frozenset[Need] = frozenset(name for name, is_wanted in wanted.items() if is_wanted)
        """What the environment must provide."""
        self.info = info or DatasetInfo()
        self.store = EpisodeStore(path, self.info, resume=resume)
        self._report = RecorderReport()
        self._attempts: dict[tuple[int, int], int] = {}
        self._writer: BackgroundWriter | None = None
        self._ready: deque[FinishedEpisode] = deque()
        self._closed = False
        self._owner = Owner()
        self._in_step = False
        self._sources: FieldSources | None = None
        self._rows: RunningRows | None = None
        self._planned = False
        self._num_envs = 0
        self._episodes: NDArray[np.int64] = np.empty(0, np.int64)
        self._seeds: list[int] = []
        self._instructions: list[str] = []
        self._lengths: NDArray[np.int64] = np.empty(0, np.int64)
        self._returns: NDArray[np.float64] = np.empty(0)
        self._substeps: list[Tensor] = []
        self._at_exit = _close_at_exit(self)

    @property
    def report(self) -> RecorderReport:
        """What became of the episodes so far."""
        self._report.waited_s = self._writer.waited_s if self._writer else 0.0
        return self._report

    @property
    def committed(self) -> int:
        """Episodes in the dataset, those of earlier runs included."""
        return len(self.store.entries)

    def has(self, seed: int, episode_id: int) -> bool:
        """Return whether an episode is committed; a plan may skip it."""
        return (seed, episode_id, 0) in self.store

    def held_bytes(self) -> int:
        """Memory of running and waiting episodes."""
        running = 0 if self._rows is None else sum(lane.held_bytes() for lane in self._rows.lanes)
        return running + (self._writer.held_bytes() if self._writer else 0)

    def after_reset(self, record: ResetRecord) -> None:
        """Begin episodes; what the same environments had not finished is forgotten."""
        self._check_open()
        if not self._num_envs:
            self._begin(record)
        if self._sources is None:
            self._sources = FieldSources(self.cfg.fields, record.obs)
        found, told = self._sources.of_reset(record)
        env_ids, episode_ids = told["env_ids"].numpy(), told["episode_ids"].numpy()
        for row, slot in enumerate(env_ids.tolist()):
            self._forget(slot)
            self._seeds[slot] = record.seed
            self._instructions[slot] = record.instructions[row] if record.instructions else ""
            if not is_text(self._instructions[slot]):
                got = f"{self._instructions[slot]!r} for episode {episode_ids[row]}"
                raise DataError(f"instructions: expected {TEXT}, got {got}")
        # an interrupt before the last line leaves environments without an episode, not episodes without a beginning
        self._episodes[env_ids] = -1
        if self._rows is None:
            self._rows = RunningRows(self._num_envs, found)
        self._rows.write_first(found, env_ids, np.arange(len(env_ids)))
        self._episodes[env_ids] = episode_ids

    def after_substep(self, record: SubstepRecord) -> None:
        """Keep the states of a substep until its step is recorded."""
        if "substeps" in self.cfg.fields:
            if record.index == 0:
                self._substeps.clear()
            self._substeps.append(record.states)

    def after_step(self, record: StepRecord) -> None:
        """Copy the rows that acted; hand over the episodes that ended."""
        self._check_open()
        if self._in_step:
            # an interrupt came in the middle of a step that the caller survived: running episodes have a gap
            self._in_step = False
            self._drop_running()
            if not self._planned:
                self._rows = None  # it may have some fields of a step and not the others
        if self._rows is None or self._sources is None:
            # attached in the middle of everything: no episode's beginning was seen yet
            done = record.step.terminated | record.step.truncated
            self._report.begun_before += int(done[record.env_ids].sum())
            return
        self._in_step = True
        substeps = torch.stack(self._substeps, dim=1) if self._substeps else None
        found, told = self._sources.of_step(record, substeps)
        env_ids = told["env_ids"].numpy()
        rows = np.flatnonzero(self._episodes[env_ids] == told["episode_ids"].numpy())
        slots = env_ids[rows]
        if len(slots):
            lengths = self._lengths[slots]
            if not self._planned:
                self._rows.add_acts(found)
                if self.store.entries:
                    there = EpisodeFile(self.store.path / self.store.entries[-1].file).fields
                    if different := first_difference(there, self._rows.fields):
                        name, was, now = different
                        raise ConfigError(
                            f"resume: {name} is {was} in the dataset and {now} now; record the same fields, or start a "
                            "new dataset"
                        )
                self._planned = True
            self._rows.write(found, slots, rows, lengths)
            self._lengths[slots] = lengths + 1
            self._returns[slots] += as_array(told["rewards"], "rewards")[slots]
        self._end_episodes(told, env_ids)
        self._in_step = False
        self._hand_over()

    def flush(self) -> None:
        """Wait until every finished episode is committed."""
        self._hand_over()
        if self._writer is not None:
            self._writer.drain()

    def close(self) -> None:
        """Commit the finished episodes and let go of the dataset; running ones are given up. Safe to call again.

        In a forked child it does nothing: the episodes, and the thread that writes them, are its parent's.
        """
        if self._closed or not self._owner.is_here:
            return
        try:
            if self._writer is not None:
                self._writer.close(self._ready)
        finally:
            # a thread that still hangs in a write keeps the dataset locked until its process ends
            if self._writer is None or not self._writer.alive:
                self._closed = True
                self._drop_running()
                self.store.close()
                atexit.unregister(self._at_exit)

    def __enter__(self) -> EpisodeRecorder:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise LifecycleError("recorder: closed; detach it, or make a new one with resume=True")
        self._owner.check(self.store.path, "detach the recorder here, or record into another directory")
        if self._writer is not None:
            self._writer.check()

    def _begin(self, record: ResetRecord) -> None:
        first = next(iter(flatten(record.obs).values()), None)
        if first is None:
            raise DataError("recorder: the environment gave no observations")
        num_envs = int(first.shape[0])
        # first of all: if the thread cannot start, nothing may be taken that would not be written
        self._writer = BackgroundWriter(
            self.store,
            capacity=self.cfg.queue_episodes or num_envs,
            within_s=self.cfg.commit_within_s,
            stall_s=self.cfg.stall_s,
        )
        self._num_envs = num_envs
        self._episodes = np.full(num_envs, -1, np.int64)
        self._seeds = [0] * num_envs
        self._instructions = [""] * num_envs
        self._lengths = np.zeros(num_envs, np.int64)
        self._returns = np.zeros(num_envs)

    def _end_episodes(self, told: Told, env_ids: NDArray[np.int64]) -> None:
        done = (told["terminated"].numpy() | told["truncated"].numpy())[env_ids]
        if not done.any():
            return
        success, diverged = (
            dict(zip(told["ended"].tolist(), told[name].tolist(), strict=True)) if name in told else {}
            for name in ("success", "diverged")
        )
        for slot in env_ids[done].tolist():
            if self._lengths[slot]:
                self._finish(slot, success.get(slot), diverged.get(slot, False))
            elif self._episodes[slot] < 0:
                self._report.begun_before += 1
            self._episodes[slot] = -1

    def _finish(self, slot: int, success: bool | None, diverged: bool) -> None:
        seed, episode_id = self._seeds[slot], int(self._episodes[slot])
        attempt = self._attempts.get((seed, episode_id), 0)
        self._attempts[seed, episode_id] = attempt + 1
        meta = EpisodeMeta(
            episode_id=episode_id,
            seed=seed,
            attempt=attempt,
            length=int(self._lengths[slot]),
            success=success,
            diverged=diverged,
            episode_return=float(self._returns[slot]),
            instruction=self._instructions[slot],
        )
        if self._keeps(meta):
            assert self._rows is not None
            self._ready.append(self._rows.finish(slot, meta))
            self._report.finished += 1
        self._lengths[slot] = 0
        self._forget(slot)

    def _keeps(self, meta: EpisodeMeta) -> bool:
        if self.cfg.keep != "all" and meta.success is None:
            raise ConfigError(
                f"keep: {self.cfg.keep!r} needs episodes that say whether they succeeded, and this task does not; "
                "use keep='all' or a task with a success measure"
            )
        if meta.length < self.cfg.min_length:
            self._report.too_short += 1
        elif self.cfg.keep == "succeeded" and not meta.success:
            self._report.not_kept += 1
        elif meta.key in self.store:
            self._report.already_there += 1
        else:
            return True
        return False

    def _hand_over(self) -> None:
        if self._writer is not None:
            self._writer.put_all(self._ready)

    def _forget(self, slot: int) -> None:
        if self._lengths[slot]:
            self._report.abandoned += 1
        self._lengths[slot] = 0
        self._returns[slot] = 0.0
        if self._rows is not None:
            self._rows.drop(slot)

    def _drop_running(self) -> None:
        for slot in range(self._num_envs):
            self._forget(slot)
        self._episodes[:] = -1


def _close_at_exit(recorder: EpisodeRecorder) -> Any:
    """Finish a recorder that was not closed when the interpreter ends, without keeping it alive until then."""
    reference = weakref.ref(recorder)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
    return close
