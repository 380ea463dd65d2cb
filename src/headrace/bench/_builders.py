"""Builders: they collect what a run measures, and make its bundle of whatever there is when the run ends.

While a loop runs, plain numbers are kept. A builder never fails for want of data: a run that was interrupted in its
first second still gives a valid bundle.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Literal, TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.bench._schema import (
    Bundle,
    CheckpointInfo,
    EnvironmentStepTiming,
    EpisodeCounts,
    EpisodePlan,
    Hardware,
    Kind,
    LibraryDescriptor,
    PerEnv,
    PerEpisode,
    PlayBundle,
    PolicyDescriptor,
    Resources,
    RunIdentity,
    Runtime,
    RuntimeBundle,
    StartupBundle,
    StartupConfig,
    StartupPhase,
    StartupTime,
    TimingMode,
    Versions,
    Warmup,
)
from headrace.bench._statistic import Proportion, Statistic
from headrace.errors import DataError

if TYPE_CHECKING:
    from pydantic import JsonValue

    from headrace.types import Step

StartupPhaseName = Literal["app_launch", "python_imports", "task_config", "env_creation", "first_step"]
STARTUP_PHASES: tuple[StartupPhaseName, ...] = get_args(StartupPhaseName)

Ended = Literal["terminated", "truncated", "diverged"]
_NOT_TASK = ("physics", "render", "observers")


class StartupClock:
    """Seconds of each phase before the first measured step."""

    def __init__(self) -> None:
        self.seconds: dict[StartupPhaseName, float] = {}

    @contextmanager
    def phase(self, name: StartupPhaseName) -> Generator[None]:
        """Time a block; phases of the same name add up. A block that raises is counted, too."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def record(self) -> StartupTime:
        """The phases so far; null for those that did not begin."""
        return StartupTime(**self.seconds)


class StepTimes:
    """Times of ``env.step``, one entry a call; ``add`` costs about a microsecond."""

    def __init__(self, mode: TimingMode = "host_return", *, on_begin: Callable[[], None] = lambda: None) -> None:
        self.mode: TimingMode = mode
        self.warmup: Warmup | None = None
        self.sim_calls: int | None = None
        """How often the physics was called, where the environment tells."""
        self._on_begin = on_begin
        self._seconds: list[float] = []
        self._frames: list[int] = []
        self._totals: list[Mapping[str, float]] = []
        self._loops: list[float] = []

    def __len__(self) -> int:
        return len(self._seconds)

    @property
    def frames(self) -> int:
        """Environment-steps so far."""
        return sum(self._frames)

    @property
    def seconds(self) -> list[float]:
        """Of each ``env.step``; do not change it."""
        return self._seconds

    def begin(self, stage_totals: Mapping[str, float] | None = None) -> None:
        """Mark the moment before the first measured step.

        Args:
            stage_totals: ``env.timer.seconds()`` of that moment, where steps will give theirs.
        """
        self._on_begin()
        self._loops.append(time.perf_counter())
        if stage_totals is not None:
            self._totals.append(stage_totals)

    def add(self, seconds: float, frames: int, stage_totals: Mapping[str, float] | None = None) -> None:
        """One step of the batch has been done.

        Args:
            seconds: of ``env.step`` alone.
            frames: environments that acted in it.
            stage_totals: ``env.timer.seconds()`` after it; all calls or none.
        """
        self._seconds.append(seconds)
        self._frames.append(frames)
        self._loops.append(time.perf_counter())
        if stage_totals is not None:
            self._totals.append(stage_totals)

    def timing(self) -> EnvironmentStepTiming | None:
        """Where the time of ``env.step`` went; None if nothing was stepped."""
        if not self._seconds:
            return None
        seconds = _positive(self._seconds)
        split = self._split()
        physics, render, task = (None if split is None else split[name] for name in ("physics", "render", "task"))
        outside = None if physics is None else np.maximum(seconds - physics, 0.0)
        step_time = _time(seconds)
        assert step_time is not None
        return EnvironmentStepTiming(
            environment_step_time_s=step_time,
            environment_step_fps=self.frames / float(seconds.sum()),
            simulation_step_time_s=_time(physics),
            outside_simulation_step_time_s=_time(outside),
            outside_simulation_step_fraction=None if outside is None else float(outside.sum() / seconds.sum()),
            environment_step_calls=len(seconds),
            simulation_step_calls=self.sim_calls,
            measurement_mode=self.mode,
            render_step_time_s=_time(render),
            task_step_time_s=_time(task),
        )

    def runtime(self, startup: StartupTime, episodes: EpisodeCounts | None) -> Runtime:
        """The runtime of a loop without learning: an iteration is one step of the batch, choosing actions included."""
        loops = _positive(np.diff(np.array(self._loops)).tolist())
        count, wall = len(self._seconds), float(loops.sum())
        stepping = float(_positive(self._seconds).sum())
        even = len(set(self._frames)) == 1
        return Runtime(
            startup_time_s=startup,
            iterations_completed=count,
            total_wall_time_s=wall,
            steps_per_iteration=self._frames[0] if even else None,
            iteration_time_s=_time(loops),
            collection_fps=self.frames / stepping if count else None,
            total_fps=self.frames / wall if count else None,
            iterations_per_s=count / wall if count else None,
            environment_step_timing=self.timing(),
            frames=self.frames,
            warmup=self.warmup,
            episodes=episodes,
        )

    def _split(self) -> dict[str, NDArray[np.float64]] | None:
        """Seconds of each stage in each step; resets are the task's, recorders and films nobody's.

        None where the environment does not tell.
        """
        if len(self._totals) != len(self._seconds) + 1:
            return None
        stages = {name for totals in self._totals for name in totals}
        if "physics" not in stages:
            return None
        spent = {
            stage: np.diff(np.array([totals.get(stage, 0.0) for totals in self._totals])) for stage in sorted(stages)
        }
        nothing = np.zeros(len(self._seconds))
        task = sum((values for stage, values in spent.items() if stage not in _NOT_TASK), nothing)
        return {"physics": spent["physics"], "render": spent.get("render", nothing), "task": task}


class EpisodeTally:
    """Episodes that ended, each counted once for the environment it ran in. Unfinished ones are not in any figure."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.rewards: list[float] = []
        self.lengths: list[int] = []
        self.env_ids: list[int] = []
        self.episode_ids: list[int | None] = []
        self.success: list[bool | None] = []
        self._ended: dict[Ended, int] = {"terminated": 0, "truncated": 0, "diverged": 0}
        self.unfinished: int | None = None
        """Episodes that were running when the loop ended; whoever runs the loop sets it."""

    def add(
        self,
        env_id: int,
        reward: float,
        length: int,
        success: bool | None,
        ended: Ended,
        episode_id: int | None = None,
    ) -> None:
        """An episode has ended in environment ``env_id``; with its id, plays can be compared episode by episode."""
        if not math.isfinite(reward):
            raise DataError(f"episode of environment {env_id}: expected a finite reward, got {reward}")
        self.env_ids.append(env_id)
        self.episode_ids.append(episode_id)
        self.rewards.append(reward)
        self.lengths.append(length)
        self.success.append(success)
        self._ended[ended] += 1

    def add_step(self, step: Step) -> int:
        """Count the episodes that ended in a step, if any; returns how many."""
        ends = step.info.get("ends")
        if ends is None:
            return 0
        flags = step.terminated[ends.env_ids].tolist()
        successes: list[bool | None] = [None] * len(ends) if ends.success is None else ends.success.tolist()
        rows = zip(
            *(ends.env_ids.tolist(), ends.returns.tolist(), ends.lengths.tolist(), successes),
            *(flags, ends.diverged.tolist(), ends.episode_ids.tolist()),
            strict=True,
        )
        for env_id, reward, length, success, terminated, diverged, episode_id in rows:
            how: Ended = "diverged" if diverged else "terminated" if terminated else "truncated"
            self.add(env_id, reward, length, success, how, episode_id)
        return len(ends)

    def counts(self) -> EpisodeCounts:
        """How the episodes ended."""
        return EpisodeCounts(completed=len(self.rewards), unfinished=self.unfinished, **self._ended)

    def success_rate(self) -> Proportion | None:
        """Over completed episodes; None where the task has no success measure, or none was completed."""
        known = [success for success in self.success if success is not None]
        return Proportion.of(sum(known), len(known))

    def per_env(self) -> PerEnv:
        """The same, environment by environment."""
        rewards: list[list[float]] = [[] for _ in range(self.num_envs)]
        lengths: list[list[int]] = [[] for _ in range(self.num_envs)]
        successes = [0] * self.num_envs
        rows = zip(self.env_ids, self.rewards, self.lengths, self.success, strict=True)
        for env_id, reward, length, success in rows:
            rewards[env_id].append(reward)
            lengths[env_id].append(length)
            successes[env_id] += bool(success)
        measured = any(success is not None for success in self.success)
        return PerEnv(
            episodes=[len(values) for values in rewards],
            reward_mean=[sum(values) / len(values) if values else None for values in rewards],
            length_mean=[sum(values) / len(values) if values else None for values in lengths],
            successes=successes if measured else None,
        )

    def per_episode(self) -> PerEpisode | None:
        """The same, episode by episode in the order of their ids; None where an id is unknown, or came twice."""
        known = [episode_id for episode_id in self.episode_ids if episode_id is not None]
        if len(known) < len(self.episode_ids) or len(set(known)) < len(known):
            return None
        order = sorted(range(len(known)), key=known.__getitem__)
        measured = any(success is not None for success in self.success)
        return PerEpisode(
            episode_ids=[known[i] for i in order],
            rewards=[self.rewards[i] for i in order],
            lengths=[self.lengths[i] for i in order],
            successes=[self.success[i] for i in order] if measured else None,
        )


class Provenance(TypedDict):
    """What the context of a run knows, for the builder to put in."""

    run: RunIdentity
    versions: Versions
    hardware: Hardware
    resources: Resources


class Builder(ABC):
    """What :class:`headrace.bench.Benchmark` asks of a builder."""

    kind: ClassVar[Kind]
    """Names the file: ``runtime.json``, ``training.json``, …"""

    def __init__(self) -> None:
        self.extra: dict[str, JsonValue] = {}
        self.on_begin: Callable[[], None] = lambda: None
        """Called when the measured part begins; the context of the run sets it."""

    @abstractmethod
    def build(self, origin: Provenance) -> Bundle:
        """The bundle of what has been collected so far."""


class RuntimeBuilder(Builder):
    """Collects a run of the environment alone."""

    kind = "runtime"

    def __init__(self, num_envs: int, *, mode: TimingMode = "host_return") -> None:
        super().__init__()
        self.startup = StartupClock()
        self.steps = StepTimes(mode, on_begin=lambda: self.on_begin())
        """Of ``env.step`` alone; choosing actions is in ``iteration_time_s`` and ``total_fps``."""
        self.episodes = EpisodeTally(num_envs)

    def build(self, origin: Provenance) -> RuntimeBundle | PlayBundle:
        """The bundle of what has been collected so far."""
        return RuntimeBundle(**origin, runtime=self.runtime(), extra=self.extra)

    def runtime(self) -> Runtime:
        """How long things took so far."""
        return self.steps.runtime(self.startup.record(), self.episodes.counts())


class PlayBuilder(RuntimeBuilder):
    """Collects a run of a trained policy."""

    kind = "play"

    def __init__(self, num_envs: int, *, plan: EpisodePlan, mode: TimingMode = "host_return") -> None:
        super().__init__(num_envs, mode=mode)
        self.plan = plan
        self.library: LibraryDescriptor | None = None
        self.policy: PolicyDescriptor | None = None
        self.checkpoint: CheckpointInfo | None = None
        self.video_path: str | None = None

    def build(self, origin: Provenance) -> PlayBundle:
        """The bundle of what has been collected so far."""
        episodes = self.episodes
        return PlayBundle(
            **origin,
            runtime=self.runtime(),
            success_rate=episodes.success_rate(),
            reward=Statistic.of(episodes.rewards, better="higher"),
            ep_length=Statistic.of(map(float, episodes.lengths), unit="steps"),
            checkpoint_path=None if self.checkpoint is None else self.checkpoint.path,
            video_path=self.video_path,
            library=self.library,
            policy=self.policy,
            checkpoint=self.checkpoint,
            plan=self.plan,
            per_env=episodes.per_env(),
            per_episode=episodes.per_episode(),
            extra=self.extra,
        )


class StartupBuilder(Builder):
    """Collects a profiled start-up."""

    kind = "startup"

    def __init__(self, config: StartupConfig) -> None:
        super().__init__()
        self.config = config
        self.phases: dict[str, StartupPhase] = {}
        self.unprofiled: StartupTime | None = None

    def build(self, origin: Provenance) -> StartupBundle:
        """The bundle of what has been collected so far."""
        return StartupBundle(
            run=origin["run"],
            versions=origin["versions"],
            hardware=origin["hardware"],
            phases=self.phases,
            config=self.config,
            unprofiled_s=self.unprofiled,
            extra=self.extra,
        )


def _positive(seconds: list[float]) -> NDArray[np.float64]:
    """At least a nanosecond each: a clock may stand still for a step that does nothing."""
    return np.maximum(np.array(seconds, dtype=np.float64), 1e-9)


def _time(values: NDArray[np.float64] | None) -> Statistic | None:
    return None if values is None else Statistic.of(values.tolist(), unit="s", better="lower")
