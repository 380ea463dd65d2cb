"""Builders: they collect what a run measures, and make its bundle of whatever there is when the run ends.

While a loop runs, plain numbers are kept. A builder never fails for want of data: a run that was interrupted in its
first second still gives a valid bundle.

The builder of training runs: curves, time split, and the rule that ends a training which has succeeded.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypedDict, cast, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.bench import schema
from headrace.bench.schema import Proportion, Statistic
from headrace.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pydantic import JsonValue

    from headrace.types import Step

StartupPhaseName = Literal["app_launch", "python_imports", "task_config", "env_creation", "first_step"]
Ended = Literal["terminated", "truncated", "diverged"]
EMA_ALPHA = 0.1
"""Weight of the newest value in the smoothed curves of a training."""
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

    def record(self) -> schema.StartupTime:
        """Return the phases so far; null for those that did not begin."""
        return schema.StartupTime(**self.seconds)


class StepTimes:
    """Times of ``env.step``, one entry a call; ``add`` costs about a microsecond."""

    def __init__(self, mode: schema.TimingMode = "host_return", *, on_begin: Callable[[], None] = lambda: None) -> None:
        self.mode: schema.TimingMode = mode
        self.warmup: schema.Warmup | None = None
        self.sim_calls: int | None = None
        """How often the physics was called, where the environment tells."""
        self._on_begin = on_begin
        self.seconds: list[float] = []
        """Of each ``env.step``."""
        self._frames: list[int] = []
        self._totals: list[Mapping[str, float]] = []
        self._loops: list[float] = []

    @property
    def frames(self) -> int:
        """Environment-steps so far."""
        return sum(self._frames)

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
        self.seconds.append(seconds)
        self._frames.append(frames)
        self._loops.append(time.perf_counter())
        if stage_totals is not None:
            self._totals.append(stage_totals)

    def timing(self) -> schema.EnvironmentStepTiming | None:
        """Where the time of ``env.step`` went; None if nothing was stepped."""
        if not self.seconds:
            return None
        seconds = _positive(self.seconds)
        split = self._split()
        physics, render, task = (None if split is None else split[name] for name in ("physics", "render", "task"))
        outside = None if physics is None else np.maximum(seconds - physics, 0.0)
        step_time = _time(seconds)
        assert step_time is not None
        return schema.EnvironmentStepTiming(
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

    def runtime(self, startup: schema.StartupTime, episodes: schema.EpisodeCounts | None) -> schema.Runtime:
        """Return the runtime of a loop without learning: an iteration is one step of the batch, choosing actions
        included."""
        loops = _positive(np.diff(np.array(self._loops)).tolist())
        count, wall = len(self.seconds), float(loops.sum())
        stepping = float(_positive(self.seconds).sum())
        even = len(set(self._frames)) == 1
        return schema.Runtime(
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
        """Seconds of each stage in each step; resets count for the task, recorders and films for no stage.

        None where the environment does not tell.
        """
        if len(self._totals) != len(self.seconds) + 1:
            return None
        stages = {name for totals in self._totals for name in totals}
        if "physics" not in stages:
            return None
        spent = {
            stage: np.diff(np.array([totals.get(stage, 0.0) for totals in self._totals])) for stage in sorted(stages)
        }
        nothing = np.zeros(len(self.seconds))
        task = sum((values for stage, values in spent.items() if stage not in _NOT_TASK), nothing)
        return {"physics": spent["physics"], "render": spent.get("render", nothing), "task": task}


class _Episode(NamedTuple):
    env_id: int
    reward: float
    length: int
    success: bool | None
    ended: Ended
    episode_id: int | None


class EpisodeTally:
    """Episodes that ended, each counted once for the environment it ran in. Unfinished ones are not in any figure."""

    def __init__(self) -> None:
        self.ended: list[_Episode] = []
        """In order of time."""
        self.unfinished: int | None = None
        """Episodes that were running when the loop ended; set by the loop."""

    def add(
        self,
        env_id: int,
        reward: float,
        length: int,
        success: bool | None,
        ended: Ended,
        episode_id: int | None = None,
    ) -> None:
        """Count an episode that ended in environment ``env_id``; with its id, plays can be compared episode by
        episode."""
        if not math.isfinite(reward):
            raise DataError(f"episode of environment {env_id}: expected a finite reward, got {reward}")
        self.ended.append(_Episode(env_id, reward, length, success, ended, episode_id))

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

    def counts(self) -> schema.EpisodeCounts:
        """How the episodes ended."""
        ended = Counter(episode.ended for episode in self.ended)
        how = {name: ended[name] for name in get_args(Ended)}
        return schema.EpisodeCounts(completed=len(self.ended), unfinished=self.unfinished, **how)

    def outcomes(self) -> dict[str, Any]:
        """Return the fields of a play about completed episodes; rates are null where the task has no success measure.

        Episode by episode in the order of their ids: null where an id is unknown, or came twice.
        """
        known = [episode.success for episode in self.ended if episode.success is not None]
        by_id = {episode.episode_id: episode for episode in self.ended}
        rows = [] if None in by_id else [by_id[number] for number in sorted(cast("dict[int, _Episode]", by_id))]
        columns = schema.PerEpisode(
            episode_ids=[cast("int", row.episode_id) for row in rows],
            rewards=[row.reward for row in rows],
            lengths=[row.length for row in rows],
            successes=[row.success for row in rows] if known else None,
        )
        return {
            "success_rate": Proportion.of(sum(known), len(known)),
            "reward": Statistic.of((episode.reward for episode in self.ended), better="higher"),
            "ep_length": Statistic.of((episode.length for episode in self.ended), unit="steps"),
            "per_episode": columns if len(rows) == len(self.ended) else None,
        }


class Provenance(TypedDict):
    """What the context of a run knows, for the builder to put in."""

    run: schema.RunIdentity
    versions: schema.Versions
    hardware: schema.Hardware
    resources: schema.Resources


class Builder(ABC):
    """What :class:`headrace.bench.benchmark.Benchmark` asks of a builder."""

    kind: ClassVar[schema.Kind]
    """Names the file: ``runtime.json``, ``training.json``, …"""

    def __init__(self) -> None:
        self.extra: dict[str, JsonValue] = {}
        self.on_begin: Callable[[], None] = lambda: None
        """Called when the measured part begins; the context of the run sets it."""
        self.startup = StartupClock()
        self.library: schema.LibraryDescriptor | None = None
        self.checkpoint: schema.CheckpointInfo | None = None
        """That a policy is from, or the newest usable one: set it after each save, so that a crashed run names it."""
        self.video_path: str | None = None

    def policy_fields(self) -> dict[str, Any]:
        """Return the fields of a bundle about the policy that acted or learned, and about what else came of the run."""
        return {
            "checkpoint_path": self.checkpoint and self.checkpoint.path,
            "video_path": self.video_path,
            "library": self.library,
            "checkpoint": self.checkpoint,
            "extra": self.extra,
        }

    @abstractmethod
    def build(self, origin: Provenance) -> schema.Bundle:
        """Return the bundle of what has been collected so far."""


class RuntimeBuilder(Builder):
    """Collects a run of the environment alone."""

    kind = "runtime"

    def __init__(self, *, mode: schema.TimingMode = "host_return") -> None:
        super().__init__()
        self.steps = StepTimes(mode, on_begin=lambda: self.on_begin())
        """Of ``env.step`` alone; choosing actions is in ``iteration_time_s`` and ``total_fps``."""
        self.episodes = EpisodeTally()

    def build(self, origin: Provenance) -> schema.RuntimeBundle | schema.PlayBundle:
        """Return the bundle of what has been collected so far."""
        return schema.RuntimeBundle(**origin, runtime=self.runtime(), extra=self.extra)

    def runtime(self) -> schema.Runtime:
        """How long things took so far."""
        return self.steps.runtime(self.startup.record(), self.episodes.counts())


class PlayBuilder(RuntimeBuilder):
    """Collects a run of a trained policy."""

    kind = "play"

    def __init__(self, *, plan: schema.EpisodePlan, mode: schema.TimingMode = "host_return") -> None:
        super().__init__(mode=mode)
        self.plan = plan
        self.policy: schema.PolicyDescriptor | None = None

    def build(self, origin: Provenance) -> schema.PlayBundle:
        """Return the bundle of what has been collected so far."""
        return schema.PlayBundle(
            **origin,
            **self.policy_fields(),
            **self.episodes.outcomes(),
            runtime=self.runtime(),
            policy=self.policy,
            plan=self.plan,
        )


class StartupBuilder(Builder):
    """Collects a profiled start-up."""

    kind = "startup"

    def __init__(self, config: schema.StartupConfig) -> None:
        super().__init__()
        self.config = config
        self.phases: dict[str, schema.StartupPhase] = {}
        self.unprofiled: schema.StartupTime | None = None

    def build(self, origin: Provenance) -> schema.StartupBundle:
        """Return the bundle of what has been collected so far."""
        about = {name: value for name, value in origin.items() if name != "resources"}
        found = {"phases": self.phases, "config": self.config, "unprofiled_s": self.unprofiled, "extra": self.extra}
        return schema.StartupBundle.model_validate(about | found)


def _positive(seconds: list[float]) -> NDArray[np.float64]:
    """At least a nanosecond each: a clock may stand still for a step that does nothing."""
    return np.maximum(np.array(seconds, dtype=np.float64), 1e-9)


def _time(values: NDArray[np.float64] | None) -> Statistic | None:
    return None if values is None else Statistic.of(values.tolist(), unit="s", better="lower")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessRule:
    """Stop once the success rate of the last ``window`` iterations reaches ``threshold``."""

    threshold: float = 0.3
    """Success rate that counts as solved."""
    window: int = 20
    """Iterations that the success rate is averaged over."""
    kind: Literal["mean", "each"] = "mean"
    """``mean``: over all episodes of the window together; ``each``: in every iteration of it, which is Isaac Lab's rule
    (an iteration in which no episode ended does not reach it)."""

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold <= 1.0:
            raise ConfigError(f"--success-threshold: expected a rate above 0 and up to 1, got {self.threshold}")
        if self.window < 1:
            raise ConfigError(f"--success-window: expected at least 1 iteration, got {self.window}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Iteration:
    """What one iteration gave; sums over its finished episodes."""

    frames: int
    collection_s: float
    learning_s: float
    ended_at: float
    episodes: int
    reward: float | None
    length: float | None
    successes: int | None


class TrainingBuilder(Builder):
    """Collects a training, one call of :meth:`iteration` after each iteration."""

    kind = "training"

    def __init__(self, *, rule: SuccessRule | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """Prepare.

        Args:
            rule: when to stop early; None for never. Without success measure it never applies.
            clock: seconds; another one in tests.
        """
        super().__init__()
        self.step_timing: schema.EnvironmentStepTiming | None = None
        self.rule, self._clock = rule, clock
        self._began: float | None = None
        self._ended: float | None = None
        self._done: list[_Iteration] = []
        self._stopped_at: int | None = None

    def begin(self) -> None:
        """Training begins now: environment and learner are made."""
        self._began = self._clock()
        self.on_begin()

    def end(self) -> None:
        """Training has ended; what follows (a last save, closing) is not measured. Without it, the build is the end."""
        self._ended = self._clock()

    def iteration(
        self,
        *,
        frames: int,
        collection_s: float,
        learning_s: float,
        rewards: Sequence[float] = (),
        lengths: Sequence[int] = (),
        successes: Sequence[bool] | None = None,
    ) -> bool:
        """Count an iteration.

        Args:
            frames: collected in it, all environments together.
            collection_s: seconds of stepping and acting.
            learning_s: seconds of learning.
            rewards: returns of the episodes that finished in it; those that are not finite are in no mean.
            lengths: their lengths.
            successes: whether they succeeded; None where the task has no such measure.

        Returns:
            True if the success rule says to stop now.
        """
        if self._began is None:
            raise ConfigError("TrainingBuilder.iteration: expected begin() first; call it before the training loop")
        count = len(rewards)
        if len(lengths) != count or (successes is not None and len(successes) != count):
            raise ConfigError(
                f"TrainingBuilder.iteration: expected as many lengths and successes as rewards ({count}), "
                f"got {len(lengths)} and {'none' if successes is None else len(successes)}"
            )
        finite = [reward for reward in rewards if math.isfinite(reward)]
        self._done.append(
            _Iteration(
                frames=frames,
                collection_s=collection_s,
                learning_s=learning_s,
                ended_at=self._clock(),
                episodes=count,
                reward=sum(finite) / len(finite) if finite else None,
                length=sum(lengths) / count if count else None,
                successes=None if successes is None else sum(successes),
            )
        )
        if self.rule is not None and self._stopped_at is None and self._has_succeeded(self.rule):
            self._stopped_at = len(self._done)
        return self._stopped_at is not None

    def _has_succeeded(self, rule: SuccessRule) -> bool:
        if len(self._done) < rule.window:
            return False
        if rule.kind == "each":
            return all(
                it.successes is not None and it.episodes > 0 and it.successes >= rule.threshold * it.episodes
                for it in self._done[-rule.window :]
            )
        recent = self._recent_success(rule.window)
        return recent is not None and recent.rate >= rule.threshold

    @property
    def stop_reason(self) -> str | None:
        """For ``Benchmark.complete``: why the rule ended the training; None if it did not."""
        if self.rule is None or self._stopped_at is None:
            return None
        how = f"{'over' if self.rule.kind == 'mean' else 'in each of'} {self.rule.window} iterations"
        return f"success rate reached {self.rule.threshold:g} {how} after iteration {self._stopped_at}"

    def build(self, origin: Provenance) -> schema.TrainingBundle:
        """Return the bundle of what has been collected so far.

        Times are those of the iterations after the first, which allocates and compiles: it is the warm-up of all that
        have others.
        """
        rule, done, began = self.rule, self._done, self._began or 0.0
        warm = int(len(done) > 1)
        measured = done[warm:]
        frames, collection, learning = (
            sum(getattr(it, name) for it in measured) for name in ("frames", "collection_s", "learning_s")
        )
        ends = [began, *(it.ended_at for it in done)]
        wall = 0.0 if self._began is None else (self._ended or self._clock()) - ends[warm]

        return schema.TrainingBundle(
            **origin,
            **self.policy_fields(),
            runtime=schema.Runtime(
                startup_time_s=self.startup.record(),
                iterations_completed=len(done),
                total_wall_time_s=wall,
                steps_per_iteration=frames // len(measured) if len({it.frames for it in measured}) == 1 else None,
                iteration_time_s=Statistic.of(np.diff(ends)[warm:], unit="s", better="lower"),
                collection_fps=frames / collection if collection > 0 else None,
                total_fps=frames / wall if wall > 0 else None,
                iterations_per_s=len(measured) / wall if wall > 0 else None,
                environment_step_timing=self.step_timing,
                frames=frames,
                collection_time_s=Statistic.of((it.collection_s for it in measured), unit="s", better="lower"),
                warmup=_warmup(ends[1] - began) if warm else None,
                episodes=schema.EpisodeCounts(completed=sum(it.episodes for it in done)),
            ),
            learning=self._learning(),
            success_rate=self._recent_success(rule.window if rule else 20),
            # the parts are measured by the learner, the whole here: what is neither is other
            time_split_s=schema.TrainingTime(
                collection=collection, learning=learning, other=wall - collection - learning
            ),
            early_stop=schema.EarlyStop(
                enabled=rule is not None,
                success_threshold=rule and rule.threshold,
                success_window=rule and rule.window,
                rule=rule and rule.kind,
                reached=self._stopped_at is not None,
                iteration=self._stopped_at,
            ),
        )

    def _learning(self) -> schema.Learning:
        done = self._done
        rates = [None if it.successes is None or not it.episodes else it.successes / it.episodes for it in done]
        return schema.Learning(
            ema_alpha=EMA_ALPHA,
            reward=self._curve([it.reward for it in done]),
            ep_length=self._curve([it.length for it in done]),
            success_rate=self._curve(rates) if any(it.successes is not None for it in done) else None,
            frames=list(itertools.accumulate(it.frames for it in done)),
            wall_time_s=[it.ended_at - (self._began or 0.0) for it in done],
            episodes=[it.episodes for it in done],
        )

    def _curve(self, raw: list[float | None]) -> schema.LearningCurve | None:
        if not raw:
            return None
        smooth: list[float | None] = []
        last: float | None = None
        for value in raw:
            if value is not None:
                last = value if last is None else last + EMA_ALPHA * (value - last)
            smooth.append(last)
        newest = next((value for value in reversed(raw) if value is not None), None)
        return schema.LearningCurve(final_raw=newest, final_ema=last, series_per_iter=raw, series_ema=smooth)

    def _recent_success(self, window: int) -> Proportion | None:
        recent = [it for it in self._done[-window:] if it.successes is not None]
        return Proportion.of(sum(it.successes or 0 for it in recent), sum(it.episodes for it in recent))


def _warmup(seconds: float) -> schema.Warmup:
    return schema.Warmup(steps=1, seconds=seconds, steady=None, rule="the first iteration", block_medians_s=[seconds])
