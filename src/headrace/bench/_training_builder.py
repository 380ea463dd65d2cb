"""The builder of training runs: curves, time split, and the rule that ends a training which has succeeded."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headrace.bench import schema
from headrace.bench._builders import Builder, Provenance
from headrace.bench.schema import Proportion, Statistic
from headrace.errors import ConfigError, DataError


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

    def __init__(
        self,
        *,
        ema_alpha: float = 0.1,
        series: bool = True,
        rule: SuccessRule | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare.

        Args:
            ema_alpha: weight of the newest value in the moving averages.
            series: False to keep only the final values of curves.
            rule: when to stop early; None for never. Without success measure it never applies.
            clock: seconds; another one in tests.
        """
        if not 0.0 < ema_alpha <= 1.0:
            raise ConfigError(f"--ema-alpha: expected above 0 and up to 1, got {ema_alpha}")
        super().__init__()
        self.step_timing: schema.EnvironmentStepTiming | None = None
        self._alpha, self._series, self.rule, self._clock = ema_alpha, series, rule, clock
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
            rewards: returns of the episodes that finished in it.
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
        if not all(map(math.isfinite, rewards)):
            raise DataError(f"TrainingBuilder.iteration: expected finite rewards, got {list(rewards)}")
        self._done.append(
            _Iteration(
                frames=frames,
                collection_s=collection_s,
                learning_s=learning_s,
                ended_at=self._clock(),
                episodes=count,
                reward=sum(rewards) / count if count else None,
                length=sum(lengths) / count if count else None,
                successes=None if successes is None else sum(successes),
            )
        )
        if self.rule is not None and self._stopped_at is None and self._succeeded(self.rule):
            self._stopped_at = len(self._done)
        return self._stopped_at is not None

    def _succeeded(self, rule: SuccessRule) -> bool:
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
        return (
            f"success rate reached {self.rule.threshold:g} "
            f"{'over' if self.rule.kind == 'mean' else 'in each of'} {self.rule.window} iterations "
            f"after iteration {self._stopped_at}"
        )

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
        done, series = self._done, self._series
        frames = list(itertools.accumulate(it.frames for it in done)) if series else None
        rates = [None if it.successes is None or not it.episodes else it.successes / it.episodes for it in done]
        return schema.Learning(
            ema_alpha=self._alpha,
            reward=self._curve([it.reward for it in done]),
            ep_length=self._curve([it.length for it in done]),
            success_rate=self._curve(rates) if any(it.successes is not None for it in done) else None,
            frames=frames,
            wall_time_s=[it.ended_at - (self._began or 0.0) for it in done] if series else None,
            episodes=[it.episodes for it in done] if series else None,
        )

    def _curve(self, raw: list[float | None]) -> schema.LearningCurve | None:
        if not raw:
            return None
        smooth: list[float | None] = []
        last: float | None = None
        for value in raw:
            if value is not None:
                last = value if last is None else last + self._alpha * (value - last)
            smooth.append(last)
        known = [value for value in raw if value is not None]
        return schema.LearningCurve(
            final_raw=known[-1] if known else None,
            final_ema=last,
            series_per_iter=raw if self._series else None,
            series_ema=smooth if self._series else None,
        )

    def _recent_success(self, window: int) -> Proportion | None:
        recent = [it for it in self._done[-window:] if it.successes is not None]
        return Proportion.of(sum(it.successes or 0 for it in recent), sum(it.episodes for it in recent))


def _warmup(seconds: float) -> schema.Warmup:
    return schema.Warmup(steps=1, seconds=seconds, steady=None, rule="the first iteration", block_medians_s=[seconds])
