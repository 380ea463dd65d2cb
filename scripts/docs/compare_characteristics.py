"""How often ``compare`` is right: false verdicts and power of every design, by simulation.

``python scripts/docs/compare_characteristics.py`` writes ``docs/benchmarks/comparison.md`` (about twenty minutes);
``--quick`` prints a small part of it. The tests use the same simulation with fewer repetitions.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "bench"))

from examples import play_bundle, runtime_bundle, training_bundle  # the path is set above

from headrace.bench._comparison import CompareCfg, Comparison, compare
from headrace.bench.schema import Bundle, PerEpisode

Order = Literal["sweep", "alternating", "random", "block"]
METRIC = "frametime.environment_step_time_s"
TEMPLATE = runtime_bundle()
PLAY = play_bundle()
TRAINING = training_bundle()
STEP_TIMES = ("environment_step_time_s", "simulation_step_time_s", "render_step_time_s", "task_step_time_s")
PHASES = ("python_imports", "task_config", "env_creation", "first_step")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One simulated experiment: n runs per side of ten metrics, each with noise of its own, drift common to all."""

    order: Order
    n: int
    noise: float
    drift: float = 0.0
    """By how much the machine is slower at the end, relative; it grows evenly."""
    change: float = 0.0
    """How much longer side B truly takes, relative."""
    accept_drift: bool = False


def simulate(case: Case, seed: int) -> Comparison:
    """One comparison."""
    generator = np.random.default_rng(seed)
    sides = _order(case, generator)
    found: tuple[list[Bundle], list[Bundle]] = ([], [])
    for place, side in enumerate(sides):
        slow = math.exp(math.log1p(case.drift) * place / (len(sides) - 1))
        factor = slow * (1.0 + case.change if side else 1.0)
        times = factor * np.exp(generator.normal(0.0, case.noise, 10))
        number = len(found[side])
        sweep = {"sweep_id": "s", "repetition": number} if case.order == "sweep" else {}
        found[side].append(_run(f"{side} {number}", place, times, sweep))
    return compare(*found, CompareCfg(accept_drift=case.accept_drift))


def rates(case: Case, repetitions: int, *, first_seed: int = 0) -> dict[str, float]:
    """Shares of comparisons: ``any`` with any metric improved or regressed; the verdicts of one metric."""
    counts = dict.fromkeys(("any", "regressed", "improved", "unchanged", "inconclusive"), 0)
    for seed in range(first_seed, first_seed + repetitions):
        comparison = simulate(case, seed)
        counts["any"] += _decided(comparison)
        counts[next(row.verdict for row in comparison.rows if row.path == METRIC) or "inconclusive"] += 1
    return {name: count / repetitions for name, count in counts.items()}


def simulate_plays(seed: int, *, episodes: int, before: float, after: float, paired: bool) -> Comparison:
    """Two plays of one policy each: episodes of unequal difficulty, the same ones on both sides if ``paired``."""
    generator = np.random.default_rng(seed)
    luck = generator.uniform(size=episodes)
    sides: list[Bundle] = []
    for number, rate in enumerate((before, after)):
        if number and not paired:
            luck = generator.uniform(size=episodes)
        # half of the luck is the episode's, half the policy's
        own = generator.uniform(size=episodes) < 0.5
        success = np.where(own, generator.uniform(size=episodes), luck) < rate
        rewards = 100.0 * success + generator.normal(0.0, 10.0, episodes)
        sides.append(_play(number, rewards.tolist(), success.tolist(), first_id=0 if paired else number * episodes))
    return compare([sides[0]], [sides[1]])


def simulate_trainings(seed: int, *, n: int, noise: float, change: float, paired: bool) -> Comparison:
    """n trainings per side whose final reward is 100 with noise, on the same seeds if ``paired``; B has more reward."""
    generator = np.random.default_rng(seed)
    sides: list[list[Bundle]] = []
    for side in (0, 1):
        rewards = 100.0 * (1.0 + side * change) * np.exp(generator.normal(0.0, noise, n))
        first = 0 if paired else side * n
        sides.append([_training(f"{side} {i}", first + i, reward) for i, reward in enumerate(rewards.tolist())])
    return compare(*sides, CompareCfg(metrics=("train.reward_final_ema",)))


def _training(run_id: str, seed: int, reward: float) -> Bundle:
    curve = TRAINING.learning.reward.model_copy(update={"final_ema": reward})
    run = TRAINING.run.model_copy(update={"run_id": run_id, "seed": seed})
    return TRAINING.model_copy(update={"run": run, "learning": TRAINING.learning.model_copy(update={"reward": curve})})


def _play(number: int, rewards: Sequence[float], successes: Sequence[bool], *, first_id: int) -> Bundle:
    rows = PerEpisode(
        episode_ids=list(range(first_id, first_id + len(rewards))),
        rewards=list(rewards),
        lengths=[10] * len(rewards),
        successes=list(successes),
    )
    return PLAY.model_copy(
        update={
            "run": PLAY.run.model_copy(update={"run_id": f"play {number}"}),
            "checkpoint": PLAY.checkpoint.model_copy(update={"sha256": str(number)}),
            "per_episode": rows,
        }
    )


def _order(case: Case, generator: np.random.Generator) -> list[int]:
    if case.order == "block":
        return [0] * case.n + [1] * case.n
    if case.order == "random":
        return generator.permutation([0, 1] * case.n).tolist()
    if case.order == "alternating":
        return [0, 1] * case.n
    return [side for number in range(case.n) for side in ((0, 1) if number % 2 == 0 else (1, 0))]


def _run(run_id: str, place: int, times: np.ndarray, identity: dict[str, object]) -> Bundle:
    """A run without the cost of statistics: only what a comparison reads."""
    stamp = f"2026-01-01T{12 + place // 3600:02d}:{place // 60 % 60:02d}:{place % 60:02d}.000Z"
    draw = iter(times.tolist())
    runtime = TEMPLATE.runtime
    timing = runtime.environment_step_timing
    timing = timing.model_copy(
        update={
            n: getattr(timing, n).model_copy(update={"mean": getattr(timing, n).mean * next(draw)}) for n in STEP_TIMES
        }
    )
    startup = runtime.startup_time_s
    startup = startup.model_copy(update={name: getattr(startup, name) * next(draw) for name in PHASES})
    changes = {
        "environment_step_timing": timing,
        "startup_time_s": startup,
        "total_fps": runtime.total_fps / next(draw),
        "iteration_time_s": runtime.iteration_time_s.model_copy(update={"mean": 0.5 * next(draw)}),
    }
    run = TEMPLATE.run.model_copy(update={"run_id": run_id, "start_time_utc": stamp, **identity})
    return TEMPLATE.model_copy(update={"run": run, "runtime": runtime.model_copy(update=changes)})


# --- the page ---


def _table(title: str, cases: Sequence[Case], column: str, repetitions: int) -> list[str]:
    drifts = sorted({case.drift for case in cases})
    noises = sorted({case.noise for case in cases})
    sizes = sorted({case.n for case in cases})
    lines = [f"### {title}", "", f"| n | noise | {' | '.join(f'drift {drift:.0%}' for drift in drifts)} |"]
    lines.append("|---:|---:|" + "---:|" * len(drifts))
    for n in sizes:
        for noise in noises:
            row = [case for case in cases if (case.n, case.noise) == (n, noise)]
            shares = [rates(case, repetitions)[column] for case in sorted(row, key=lambda case: case.drift)]
            lines.append(f"| {n} | {noise:.0%} | {' | '.join(f'{share:.1%}' for share in shares)} |")
            print(lines[-1], flush=True)
    return [*lines, ""]


def _grid(order: Order, *, change: float, quick: bool, accept_drift: bool = False) -> list[Case]:
    sizes, noises, drifts = ((5, 10, 20, 40), (0.01, 0.03, 0.1, 0.3), (0.0, 0.2, 0.4))
    if quick:
        sizes, noises, drifts = (10,), (0.03,), (0.0, 0.4)
    return [
        Case(order=order, n=n, noise=noise, drift=drift, change=change, accept_drift=accept_drift)
        for n in sizes
        for noise in noises
        for drift in drifts
    ]


def _plays(repetitions: int) -> list[str]:
    lines = [
        "### Plays and evaluations: success of one policy per side",
        "",
        "| episodes | design | 60 % and 60 % | 60 % and 70 % |",
    ]
    lines.append("|---:|---|---:|---:|")
    for episodes in (100, 1000):
        for paired in (True, False):
            shares: list[float] = []
            for after in (0.6, 0.7):
                found = [
                    simulate_plays(seed, episodes=episodes, before=0.6, after=after, paired=paired)
                    for seed in range(repetitions)
                ]
                shares.append(sum(map(_decided, found)) / repetitions)
            design = "the same episodes" if paired else "different episodes"
            lines.append(f"| {episodes:,} | {design} | {shares[0]:.1%} | {shares[1]:.1%} |")
            print(lines[-1], flush=True)
    return [*lines, ""]


def _trainings(repetitions: int) -> list[str]:
    lines = ["### Trainings: final reward, a seed is the unit", ""]
    lines += ["| n | noise | seeds | false verdicts | power for +10 % |", "|---:|---:|---|---:|---:|"]
    for n in (5, 10, 20, 40):
        for noise in (0.01, 0.03, 0.1, 0.3):
            for paired in (True, False):
                shares: list[float] = []
                for change in (0.0, 0.1):
                    found = [
                        simulate_trainings(seed, n=n, noise=noise, change=change, paired=paired)
                        for seed in range(repetitions)
                    ]
                    shares.append(sum(map(_decided, found)) / repetitions)
                seeds = "shared" if paired else "different"
                lines.append(f"| {n} | {noise:.0%} | {seeds} | {shares[0]:.1%} | {shares[1]:.1%} |")
                print(lines[-1], flush=True)
    return [*lines, ""]


def _decided(comparison: Comparison) -> bool:
    return bool(comparison.count("improved") or comparison.count("regressed"))


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    repetitions = 40 if arguments.quick else 100
    page = [
        "# How often `compare` is right",
        "",
        "Simulated; made by `python scripts/docs/compare_characteristics.py`, "
        f"{repetitions} comparisons per cell. A comparison has n runs per side of ten metrics with independent noise "
        "(standard deviation of the logarithm); the machine grows evenly slower by the drift from the first run to the "
        "last. Default options: `--alpha 0.01`, `--min-effect 0.05`.",
        "",
        "False verdicts: equal sides, share of comparisons in which any of the ten metrics is called improved or "
        "regressed. Power: side B takes 10 % longer, share in which one metric is called regressed.",
        "",
    ]
    names: dict[Order, str] = {
        "sweep": "Sweep: A B, B A, A B, …, paired by repetition",
        "alternating": "Alternating by hand: A B A B …, not paired",
        "random": "In random order, not paired",
    }
    for order, name in names.items():
        for change, column, what in ((0.0, "any", "false verdicts"), (0.1, "regressed", "power")):
            cases = _grid(order, change=change, quick=arguments.quick)
            page += _table(f"{name}: {what}", cases, column, repetitions)
    page += _table(
        "Blocks with `--accept-drift`: A A A … B B B …: false verdicts (without the option no verdict is given)",
        _grid("block", change=0.0, quick=arguments.quick, accept_drift=True),
        "any",
        repetitions,
    )
    page += _trainings(repetitions)
    page += _plays(repetitions)
    if not arguments.quick:
        (ROOT / "docs" / "benchmarks" / "comparison.md").write_text("\n".join(page))


if __name__ == "__main__":
    main()
