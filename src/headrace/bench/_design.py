"""The design of the data: which numbers of two sets of runs are independent, which belong together, and whether the
order of the runs lets them be compared at all. Decided from the bundles before any number is looked at.

| metrics | unit | paired if | refused if |
|---|---|---|---|
| time, memory | a run | sides took turns in one sweep | one side ran before the other |
| outcome of a training | a (settings, seed) | both sides have the same seeds | |
| outcome of a play or evaluation of one policy | an episode | both sides played the same episodes | |
| the same of several policies | a policy | | |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headrace.bench._metrics import Metric
from headrace.bench._schema import Bundle, PlayBundle, StartupBundle
from headrace.bench._significance import Moments
from headrace.bench._statistic import Proportion, Statistic

Unit = Literal["run", "seed", "policy", "episode"]
_FEWEST_SHARED = 20
_DRIFT_BOUND = 0.25


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSample:
    """One outcome over episodes: matched value by value, or only as two sets."""

    pairs: list[tuple[float, float]] | None
    before: Moments
    after: Moments


def time_layout(before: Sequence[Bundle], after: Sequence[Bundle], *, accept_drift: bool) -> Layout:
    """For numbers that depend on the machine, which may grow slower while the runs are made."""
    first, second = ({turn: [run] for run in side if (turn := _turn(run)) is not None} for side in (before, after))
    shared = [turn for turn in first if turn in second]
    if len(shared) >= 3 and _took_turns([(first[turn][0], second[turn][0]) for turn in shared]):
        return Layout(unit="run", before=first, after=second, pairs=[(turn, turn) for turn in shared])
    alone = [{run.run.run_id: [run] for run in side} for side in (before, after)]
    return Layout(
        unit="run",
        before=alone[0],
        after=alone[1],
        pairs=None,
        refused=None if accept_drift else _order_problem(before, after),
    )


def outcome_layout(before: Sequence[Bundle], after: Sequence[Bundle]) -> Layout:
    """For outcomes of runs. A run that repeats settings and seed repeats the outcome: it is no further observation."""
    if all(isinstance(run, PlayBundle) for run in (*before, *after)):
        by_policy = [_grouped(side, policy_of) for side in (before, after)]
        return Layout(unit="policy", before=by_policy[0], after=by_policy[1], pairs=None)
    first, second = (_grouped(side, lambda run: f"{run.run.seed} {_settings(run)}") for side in (before, after))
    by_seed = [{runs[0].run.seed: unit for unit, runs in side.items()} for side in (first, second)]
    pairs = None
    if len(by_seed[0]) == len(first) and len(by_seed[1]) == len(second) and by_seed[0].keys() == by_seed[1].keys():
        pairs = [(by_seed[0][seed], by_seed[1][seed]) for seed in by_seed[0]]
    return Layout(unit="seed", before=first, after=second, pairs=pairs if pairs and len(pairs) >= 3 else None)


def one_policy_each(before: Sequence[Bundle], after: Sequence[Bundle]) -> bool:
    """Whether the sides are plays of one policy each: then episodes are the units."""
    sides = [{policy_of(run) for run in side if isinstance(run, PlayBundle)} for side in (before, after)]
    return all(len(policies) == 1 for policies in sides)


def cut_short(runs: Iterable[Bundle]) -> str | None:
    """Why outcomes of these plays cannot be judged: long episodes could not be among the finished ones."""
    for run in runs:
        if isinstance(run, PlayBundle) and run.plan is not None and run.plan.shorter_than_episode:
            return (
                f"{run.run.run_id} played fewer steps than an episode may take, so long episodes are missing; "
                "play whole episodes with --episodes"
            )
    return None


def episode_sample(metric: Metric, before: Sequence[Bundle], after: Sequence[Bundle]) -> EpisodeSample | str:
    """An outcome of two sets of plays over their episodes; a text if there is none to be had."""
    sides = [_values(metric, side) for side in (before, after)]
    if all(sides):
        shared = sides[0].keys() & sides[1].keys()
        enough = max(_FEWEST_SHARED, 0.5 * max(len(sides[0]), len(sides[1])))
        if len(shared) >= enough or sides[0].keys() == sides[1].keys():
            pairs = [(sides[0][key], sides[1][key]) for key in sorted(shared)]
            one, other = (_moments([pair[i] for pair in pairs]) for i in (0, 1))
            return EpisodeSample(pairs=pairs, before=one, after=other)
    found = [
        _moments(list(values.values())) if values else _kept_moments(metric, side)
        for values, side in zip(sides, (before, after), strict=True)
    ]
    if found[0] is None or found[1] is None:
        return "the bundles keep neither episodes nor their number; play again with this version"
    return EpisodeSample(pairs=None, before=found[0], after=found[1])


def policy_of(run: Bundle) -> str:
    """What acted: the hash of a checkpoint, else its path or name."""
    if not isinstance(run, PlayBundle):
        return run.run.run_id
    checkpoint, policy = run.checkpoint, run.policy
    if checkpoint is not None:
        return checkpoint.sha256 or checkpoint.path
    return run.checkpoint_path or ("" if policy is None else f"{policy.kind} {policy.name}")


def unsteady(run: Bundle) -> bool:
    """Whether the run says that its warm-up did not reach a steady step time."""
    return not isinstance(run, StartupBundle) and run.runtime.warmup is not None and not run.runtime.warmup.steady


def _turn(run: Bundle) -> str | None:
    sweep, repetition = run.run.sweep_id, run.run.repetition
    return None if sweep is None or repetition is None else f"{sweep} {repetition}"


def _took_turns(pairs: Sequence[tuple[Bundle, Bundle]]) -> bool:
    """Whether each side came first about equally often; then drift adds to some differences and takes from others."""
    leads = sum(first.run.start_time_utc <= second.run.start_time_utc for first, second in pairs)
    ties = sum(first.run.start_time_utc == second.run.start_time_utc for first, second in pairs)
    return ties == len(pairs) or min(leads, len(pairs) - leads) >= len(pairs) // 3


def _order_problem(before: Sequence[Bundle], after: Sequence[Bundle]) -> str | None:
    """Whether drift could look like a difference: side and time must not go together.

    Drift of any size shifts the rank test by at most 2.45·|imbalance|·√n standard errors; 0.25 bounds that by 0.6,
    which leaves the chance of a false verdict below 2.5 % at α = 1 %.
    """
    first = np.array([run.run.start_time_utc for run in before])
    second = np.array([run.run.start_time_utc for run in after])
    if len(first) < 2 or len(second) < 2:
        return None
    later = (second[:, None] > first[None, :]).mean() + 0.5 * (second[:, None] == first[None, :]).mean()
    size = 2 * len(first) * len(second) / (len(first) + len(second))
    if abs(later - 0.5) * math.sqrt(size) <= _DRIFT_BOUND:
        return None
    which = "B" if later > 0.5 else "A"
    return (
        f"side {which} ran later than the other: a machine that grew slower looks like a change of the code. Run both "
        "in turn with 'headrace sweep', or pass --accept-drift if the machine cannot have changed"
    )


def _grouped(runs: Sequence[Bundle], key: Callable[[Bundle], str]) -> dict[str, list[Bundle]]:
    found: dict[str, list[Bundle]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return found


def _settings(run: Bundle) -> str:
    library = getattr(run, "library", None)
    return f"{run.run.config.model_dump_json()} {'' if library is None else library.settings}"


def _values(metric: Metric, runs: Sequence[Bundle]) -> dict[tuple[int, int], float]:
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


def _kept_moments(metric: Metric, runs: Sequence[Bundle]) -> Moments | None:
    """From what bundles without episodes keep; runs of one seed repeat each other, so one of each counts."""
    from headrace.bench._metrics import metrics

    once = {run.run.seed: run for run in runs}
    parts: list[Moments] = []
    for run in once.values():
        spread = next((found.spread for found in metrics(run) if found.path == metric.path), None)
        if isinstance(spread, Proportion) and spread.n and spread.successes is not None:
            rate = spread.successes / spread.n
            parts.append(Moments(rate, math.sqrt(rate * (1 - rate)), spread.n))
        elif isinstance(spread, Statistic) and spread.n and spread.n > 1 and spread.std is not None:
            parts.append(Moments(spread.mean, spread.std, spread.n))
        else:
            return None
    count = sum(part.n for part in parts)
    mean = sum(part.mean * part.n for part in parts) / count
    squares = sum((part.n - 1) * part.std**2 + part.n * (part.mean - mean) ** 2 for part in parts)
    return Moments(mean, math.sqrt(squares / max(count - 1, 1)), count)


def _moments(values: Sequence[float]) -> Moments:
    data = np.asarray(values, dtype=np.float64)
    return Moments(float(data.mean()), float(data.std(ddof=1)) if len(data) > 1 else 0.0, len(data))
