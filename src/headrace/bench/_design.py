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

from headrace.bench._schema import Bundle, PlayBundle, StartupBundle

Unit = Literal["run", "seed", "policy"]
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
        refused = cut_short((*before, *after))
        return Layout(unit="policy", before=by_policy[0], after=by_policy[1], pairs=None, refused=refused)
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
    return not isinstance(run, StartupBundle) and run.runtime.warmup is not None and run.runtime.warmup.steady is False


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
