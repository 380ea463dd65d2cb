"""The values of a metric on both sides, arranged by the design of the data: what a test is given.

The design says which numbers of two sets of runs are independent, which belong together, and whether the order of the
runs lets them be compared at all. It is decided from the bundles before any number is looked at.

| metrics | unit | paired if | refused if |
|---|---|---|---|
| time, memory | a run | both sides are of one sweep | not of a sweep, whose order is drawn at random |
| outcome of a training | a (settings, seed) | both sides have the same seeds | |
| outcome of a play or evaluation of one policy | an episode | both sides played the same episodes | |
| the same of several policies | a policy | | |
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.bench._significance import Moments
from headrace.bench.figures import Metric, metrics
from headrace.bench.schema import Bundle, PlayBundle, Proportion, StartupBundle

Scale = Literal["relative", "points", "absolute"]
Unit = Literal["run", "seed", "policy"]
_FEWEST_SHARED = 20
ORDER_MARK = "-order"
"""In the id of a sweep whose order is drawn, followed by its seed."""
_FEWEST_PAIRS = 8
"""Steady pairs of a sweep that suffice; with fewer, the others are used as well."""
_NOT_DRAWN = (
    "the order of these runs was not drawn at random, so a change of the machine can look like one of the code; run "
    "both sides with 'headrace sweep', or pass --accept-drift if the machine cannot have changed"
)
_PLURALS = {"run": "runs", "seed": "seeds", "policy": "policies"}


@dataclass(slots=True, kw_only=True)
class Sample:
    """A metric on both sides."""

    metric: Metric
    before: list[float]
    """One value per unit."""
    after: list[float]
    unit: str
    """Plural: runs, seeds, policies or episodes."""
    paired: bool = False
    refused: str | None = None
    """Why no verdict can be given."""

    @property
    def moments(self) -> tuple[Moments, Moments]:
        """Mean, standard deviation and number of the units of each side."""
        return Moments.of(self.before), Moments.of(self.after)

    @property
    def by_episode(self) -> bool:
        """Whether episodes are the units."""
        return self.unit == "episodes"

    @property
    def scale(self) -> Scale:
        """How a difference is meant."""
        if isinstance(self.metric.spread, Proportion):
            return "points"
        positive = min((*self.before, *self.after), default=math.inf) > 0
        return "relative" if positive and self.metric.role != "outcome" else "absolute"

    @property
    def centers(self) -> tuple[float, float]:
        """What to show of the sides: medians of runs, means of episodes; NaN where there is nothing."""
        one, other = self.moments
        if not one.n or not other.n:
            return math.nan, math.nan
        if self.by_episode:
            return one.mean, other.mean
        return statistics.median(self.before), statistics.median(self.after)

    @property
    def sizes(self) -> str:
        """How many units, in words."""
        one, other = self.moments
        return f"{one.n:,} pairs of {self.unit}" if self.paired else f"{one.n:,} and {other.n:,} {self.unit}"

    def margin(self, min_effect: float) -> float:
        """Return what matters, on the scale of the test: a log ratio, points, or a difference.

        A difference matters relative to the larger of the centers or, near zero, to the spread of the units.
        """
        if self.scale == "relative":
            return math.log1p(min_effect)
        if self.scale == "points":
            return min_effect
        return min_effect * max(*map(abs, self.centers), statistics.fmean(side.std for side in self.moments))

    def on_scale(self) -> tuple[list[float], list[float]]:
        """Return the values as the test takes them."""
        if self.scale == "relative":
            return [math.log(value) for value in self.before], [math.log(value) for value in self.after]
        return self.before, self.after

    def differences(self) -> list[float]:
        """Of the pairs, on the scale of the test."""
        return [after - before for before, after in zip(*self.on_scale(), strict=True)]

    def spread(self) -> float:
        """Return the standard deviation of the difference of two units, on the scale of the test."""
        if self.paired:
            return Moments.of(self.differences()).std
        return math.hypot(*(Moments.of(side).std for side in self.on_scale()))


class Arrangement:
    """Gives the sample of each metric; layouts are made once per role."""

    def __init__(
        self, before: list[Bundle], after: list[Bundle], notes: list[str], *, accept_drift: bool, per_frame: bool
    ) -> None:
        """Arrange the runs of two sides.

        Args:
            before: completed runs.
            after: likewise.
            notes: gets what a reader should know.
            accept_drift: judge times also where the order of the runs, or a warm-up, speaks against it.
            per_frame: whether the batches differ in size.
        """
        self._runs = (before, after)
        self._metrics = {run.run.run_id: find_metrics([run], per_frame=per_frame) for run in (*before, *after)}
        self._time = time_layout(before, after, notes, accept_drift=accept_drift)
        self._outcome = outcome_layout(before, after)
        # plays of one policy each: then episodes are the units
        plays = [{identify_policy(run) for run in side if isinstance(run, PlayBundle)} for side in self._runs]
        self._by_episode = all(len(policies) == 1 for policies in plays)

    def of(self, metric: Metric) -> Sample:
        """Return the values of a metric on both sides."""
        if metric.role == "outcome" and self._by_episode:
            return self._episodes(metric)
        return self._units(metric, self._outcome if metric.role == "outcome" else self._time)

    def _episodes(self, metric: Metric) -> Sample:
        sides = [_episode_values(metric, runs) for runs in self._runs]
        sample = Sample(metric=metric, before=[], after=[], unit="episodes")
        sample.refused = cut_short((*self._runs[0], *self._runs[1]))
        if not all(sides):
            sample = self._units(metric, self._outcome)
            sample.refused = "the bundles do not keep every episode by its id; play again with this version"
            return sample
        shared = sorted(sides[0].keys() & sides[1].keys())
        enough = max(_FEWEST_SHARED, 0.5 * max(map(len, sides)))
        sample.paired = len(shared) >= enough or sides[0].keys() == sides[1].keys()
        chosen = (shared, shared) if sample.paired else sides
        sample.before, sample.after = ([side[key] for key in keys] for side, keys in zip(sides, chosen, strict=True))
        return sample

    def _units(self, metric: Metric, layout: Layout) -> Sample:
        sides = [self._numbers(metric.path, units) for units in (layout.before, layout.after)]
        missing = [
            f"{len(units) - len(found)} of {len(units)} {_PLURALS[layout.unit]} of side {name}"
            for found, units, name in zip(sides, (layout.before, layout.after), "AB", strict=True)
            if 0 < len(found) < len(units)
        ]
        pairs = layout.pairs
        if pairs is not None:
            pairs = [(one, other) for one, other in pairs if one in sides[0] and other in sides[1]]
        keys = (list(sides[0]), list(sides[1])) if pairs is None else tuple(zip(*pairs, strict=True)) or ((), ())
        before, after = ([side[key] for key in wanted] for side, wanted in zip(sides, keys, strict=True))
        return Sample(
            metric=metric,
            before=before,
            after=after,
            unit=_PLURALS[layout.unit],
            paired=pairs is not None,
            refused=f"missing in {' and '.join(missing)}" if missing else layout.refused,
        )

    def _numbers(self, path: str, units: Mapping[str, list[Bundle]]) -> dict[str, float]:
        """Return the value of each unit that has one."""
        found: dict[str, float] = {}
        for key, runs in units.items():
            here = [self._metrics[run.run.run_id].get(path) for run in runs]
            known = [metric.value for metric in here if metric is not None]
            if known:
                found[key] = statistics.fmean(known)
        return found


def find_metrics(runs: Sequence[Bundle], *, per_frame: bool) -> dict[str, Metric]:
    """Path → the metric of the first run that has it."""
    found: dict[str, Metric] = {}
    for run in runs:
        for metric in metrics(run):
            shown = metric.per_frame() if per_frame else metric
            found.setdefault(shown.path, shown)
    return found


def _episode_values(metric: Metric, runs: Sequence[Bundle]) -> dict[tuple[int, int], float]:
    """(seed, episode id) → the outcome of the episode; nothing where a run does not keep them."""
    found: dict[tuple[int, int], float] = {}
    for run in runs:
        if not isinstance(run, PlayBundle) or run.per_episode is None:
            return {}
        rows = run.per_episode
        columns: dict[str, Sequence[float | bool | None]] = {
            "reward": rows.rewards,
            "ep_length": rows.lengths,
            "success_rate": rows.successes or [],
        }
        column = columns.get(metric.name, [])
        if len(column) != len(rows.episode_ids):
            return {}
        found |= {
            (run.run.seed, episode): float(value)
            for episode, value in zip(rows.episode_ids, column, strict=True)
            if value is not None
        }
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the runs of two sides are arranged for one role of metrics."""

    unit: Unit
    before: Mapping[str, list[Bundle]]
    """Unit → its runs. The number of a unit is the mean over its runs."""
    after: Mapping[str, list[Bundle]]
    pairs: list[tuple[str, str]] | None
    """Units that belong together; None where none do."""
    refused: str | None = None
    """Why no verdict can be given."""


def time_layout(before: Sequence[Bundle], after: Sequence[Bundle], notes: list[str], *, accept_drift: bool) -> Layout:
    """Arrange numbers that depend on the machine, whose load changes while the runs are made.

    Only a sweep draws at random which side comes first, and so makes every load hit both sides with the same chance.
    """
    first, second = ({turn: [run] for run in side if (turn := _turn(run)) is not None} for side in (before, after))
    pairs = {turn: (first[turn][0], second[turn][0]) for turn in first if turn in second}
    drawn = all(_order_was_drawn(run) for pair in pairs.values() for run in pair)
    if len(pairs) >= 2 and (drawn or accept_drift):
        steady = [turn for turn, pair in pairs.items() if accept_drift or not any(map(unsteady, pair))]
        enough = len(steady) >= _FEWEST_PAIRS
        if len(steady) < len(pairs):
            kept = "are left out of times" if enough else f"are used as well, since only {len(steady)} others are left"
            notes.append(
                f"{len(pairs) - len(steady)} pairs with a run that did not reach a steady step time before measuring "
                f"{kept}; use longer --warmup-steps"
            )
        used = steady if enough else list(pairs)
        return Layout(unit="run", before=first, after=second, pairs=[(turn, turn) for turn in used])
    first, second = ({run.run.run_id: [run] for run in side} for side in (before, after))
    judged = accept_drift or min(len(first), len(second)) < 2  # of a single run there is more to say
    return Layout(unit="run", before=first, after=second, pairs=None, refused=None if judged else _NOT_DRAWN)


def outcome_layout(before: Sequence[Bundle], after: Sequence[Bundle]) -> Layout:
    """For outcomes of runs. A run that repeats settings and seed repeats the outcome: it is no further observation."""
    if all(isinstance(run, PlayBundle) for run in (*before, *after)):
        by_policy = [_group_by(side, identify_policy) for side in (before, after)]
        refused = cut_short((*before, *after))
        return Layout(unit="policy", before=by_policy[0], after=by_policy[1], pairs=None, refused=refused)
    first, second = (_group_by(side, _seed_and_settings) for side in (before, after))
    by_seed = [{runs[0].run.seed: unit for unit, runs in side.items()} for side in (first, second)]
    pairs = None
    if len(first) == len(second) == len(by_seed[0]) >= 3 and by_seed[0].keys() == by_seed[1].keys():
        pairs = [(by_seed[0][seed], by_seed[1][seed]) for seed in by_seed[0]]
    return Layout(unit="seed", before=first, after=second, pairs=pairs)


def cut_short(runs: Iterable[Bundle]) -> str | None:
    """Why outcomes of these plays cannot be judged: long episodes are less often among the finished ones."""
    for run in runs:
        if not isinstance(run, PlayBundle) or run.plan is None or run.plan.kind != "steps":
            continue
        episodes = run.runtime.episodes
        if run.plan.shorter_than_episode or episodes is None or episodes.unfinished:
            return (
                f"{run.run.run_id} played a number of steps, so episodes that were cut off, mostly long ones, are "
                "missing; play whole episodes with --episodes"
            )
    return None


def identify_policy(run: Bundle) -> str:
    """Return what acted: the hash of a checkpoint, else its path or name."""
    if not isinstance(run, PlayBundle):
        return run.run.run_id
    checkpoint, policy = run.checkpoint, run.policy
    if checkpoint is not None:
        return checkpoint.sha256 or checkpoint.path
    return run.checkpoint_path or ("" if policy is None else policy.policy_id or f"{policy.kind} {policy.name}")


def unsteady(run: Bundle) -> bool:
    """Whether the run says that its warm-up did not reach a steady step time."""
    return not isinstance(run, StartupBundle) and run.runtime.warmup is not None and run.runtime.warmup.steady is False


def _order_was_drawn(run: Bundle) -> bool:
    """Return whether a sweep drew its order; an older version records only the id that the sweep gave it."""
    return run.run.order_seed is not None or ORDER_MARK in (run.run.sweep_id or "")


def _turn(run: Bundle) -> str | None:
    sweep, repetition = run.run.sweep_id, run.run.repetition
    return None if sweep is None or repetition is None else f"{sweep} {repetition}"


def _group_by(runs: Sequence[Bundle], key: Callable[[Bundle], str]) -> dict[str, list[Bundle]]:
    found: dict[str, list[Bundle]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return found


def _seed_and_settings(run: Bundle) -> str:
    library = getattr(run, "library", None)
    return f"{run.run.seed} {run.run.config.model_dump_json()} {'' if library is None else library.settings}"
