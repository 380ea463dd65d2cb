"""Builders: they collect what a run measures, and make its bundle of whatever there is when the run ends.

A builder never fails for want of data: a run that was interrupted in its first second still gives a valid bundle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from headrace.bench._learning_schema import (
    CheckpointInfo,
    EpisodeCounts,
    EpisodePlan,
    LibraryDescriptor,
    PerEnv,
    PerEpisode,
    PolicyDescriptor,
)
from headrace.bench._schema import (
    Bundle,
    Hardware,
    Kind,
    PlayBundle,
    Resources,
    RunIdentity,
    RuntimeBundle,
    StartupBundle,
    StartupConfig,
    StartupPhase,
    StartupTime,
    TimingMode,
    Versions,
)
from headrace.bench._statistic import Proportion, Statistic
from headrace.bench._step_times import StartupClock, StepTimes
from headrace.errors import DataError

if TYPE_CHECKING:
    from pydantic import JsonValue

    from headrace.types import Step

Ended = Literal["terminated", "truncated", "diverged"]


class Provenance(NamedTuple):
    """What the context of a run knows, for the builder to put in."""

    run: RunIdentity
    versions: Versions
    hardware: Hardware
    resources: Resources


class Builder(Protocol):
    """What :class:`headrace.bench.Benchmark` asks of a builder."""

    @property
    def kind(self) -> Kind:
        """Names the file: ``runtime.json``, ``training.json``, …"""
        ...

    def build(self, origin: Provenance) -> Bundle:
        """The bundle of what has been collected so far."""
        ...

    def watch(self, began: Callable[[], None]) -> None:
        """Call ``began`` when the measured part begins."""
        ...


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


class RuntimeBuilder:
    """Collects a run of the environment alone."""

    kind: Kind = "runtime"

    def __init__(self, num_envs: int, *, mode: TimingMode = "host_return") -> None:
        self.startup = StartupClock()
        self.steps = StepTimes(mode)
        self.episodes = EpisodeTally(num_envs)
        self.extra: dict[str, JsonValue] = {}

    def watch(self, began: Callable[[], None]) -> None:
        """Call ``began`` when the measured part begins."""
        self.steps.on_begin = began

    def build(self, origin: Provenance) -> RuntimeBundle:
        """The bundle of what has been collected so far."""
        return RuntimeBundle(
            run=origin.run,
            versions=origin.versions,
            hardware=origin.hardware,
            resources=origin.resources,
            runtime=self.steps.runtime(self.startup.record(), self.episodes.counts()),
            extra=self.extra,
        )


class PlayBuilder:
    """Collects a run of a trained policy."""

    kind: Kind = "play"

    def __init__(self, num_envs: int, *, plan: EpisodePlan, mode: TimingMode = "host_return") -> None:
        self.startup = StartupClock()
        self.steps = StepTimes(mode)
        """Of ``env.step`` alone; choosing actions is in ``iteration_time_s`` and ``total_fps``."""
        self.episodes = EpisodeTally(num_envs)
        self.plan = plan
        self.library: LibraryDescriptor | None = None
        self.policy: PolicyDescriptor | None = None
        self.checkpoint: CheckpointInfo | None = None
        self.video_path: str | None = None
        self.extra: dict[str, JsonValue] = {}

    def watch(self, began: Callable[[], None]) -> None:
        """Call ``began`` when the measured part begins."""
        self.steps.on_begin = began

    def build(self, origin: Provenance) -> PlayBundle:
        """The bundle of what has been collected so far."""
        episodes = self.episodes
        return PlayBundle(
            run=origin.run,
            versions=origin.versions,
            hardware=origin.hardware,
            resources=origin.resources,
            runtime=self.steps.runtime(self.startup.record(), episodes.counts()),
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


class StartupBuilder:
    """Collects a profiled start-up."""

    kind: Kind = "startup"

    def __init__(self, config: StartupConfig) -> None:
        self.config = config
        self.phases: dict[str, StartupPhase] = {}
        self.unprofiled: StartupTime | None = None
        self.extra: dict[str, JsonValue] = {}

    def watch(self, began: Callable[[], None]) -> None:
        """Everything is measured."""
        del began

    def build(self, origin: Provenance) -> StartupBundle:
        """The bundle of what has been collected so far."""
        return StartupBundle(
            run=origin.run,
            versions=origin.versions,
            hardware=origin.hardware,
            phases=self.phases,
            config=self.config,
            unprofiled_s=self.unprofiled,
            extra=self.extra,
        )
