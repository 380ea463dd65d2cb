"""How often ``compare`` is right: false verdicts, wrong "unchanged" and power of every design, by simulation.

``python scripts/docs/compare_characteristics.py`` writes ``docs/benchmarks/comparison.md``: about half an hour, or less
with fewer comparisons per cell (``--times``). ``--quick`` prints a small part of it. ``--check`` exits 1 and names each
design that exceeds its bar. The tests use the same simulation with fewer repetitions.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # matrices are small: threads take seven times the processor time

import numpy as np
from numpy.typing import NDArray

from headrace.bench._samples import Sample
from headrace.bench._significance import exact_rate_interval
from headrace.bench.comparing import LOOKS
from headrace.bench.comparison import MetricComparison, judge
from headrace.bench.figures import Metric
from headrace.bench.schema import Proportion

ROOT = Path(__file__).resolve().parents[2]
Load = Literal["even", "drift of 40 %", "every second run", "every fourth run", "autocorrelated", "two-valued"]
LOADS: tuple[Load, ...] = (
    *("even", "drift of 40 %", "every second run", "every fourth run", "autocorrelated", "two-valued"),
)
METRICS = 10
FALSE_BAR, UNCHANGED_BAR, POWER_BAR = 0.015, 0.05, 0.80


@dataclass(frozen=True, kw_only=True)
class SweepCase:
    """n pairs of runs of ten metrics with noise of their own, on a machine whose load is common to all of them."""

    n: int
    noise: float = 0.03
    load: Load = "even"
    change: float = 0.0
    """How much longer side B truly takes, relative."""


def simulate_sweep(case: SweepCase, seed: int) -> list[MetricComparison]:
    """Return the verdicts of one sweep, whose order is drawn within each pair."""
    return judge(_sweep_samples(case, seed, case.n), alpha=0.01, min_effect=0.05)


def simulate_until_decided(case: SweepCase, seed: int) -> list[MetricComparison]:
    """Return the verdicts of a sweep that stops when it is decided, at most after ``case.n`` pairs."""
    looks = [look for look in LOOKS if look <= case.n]
    rows: list[MetricComparison] = []
    for look in looks:
        rows = judge(_sweep_samples(case, seed, look), alpha=0.01, min_effect=0.05, looks=len(looks))
        if all(row.verdict != "inconclusive" for row in rows):
            break
    return rows


def simulate_trainings(
    seed: int, *, n: int, paired: bool, change: float = 0.0, noise: float = 0.1, two_valued: bool = False
) -> list[MetricComparison]:
    """Return the verdicts on the final reward of n trainings per side: normal, or 0 and 100 equally often."""
    generator = np.random.default_rng(seed)
    draws = generator.normal(100.0, 100.0 * noise, (2, n))
    values = 100.0 * generator.integers(0, 2, (2, n)) if two_valued else draws
    metric = Metric("train", "reward", 0.0, None, "higher", role="outcome")
    before, after = values[0].tolist(), (values[1] + 100.0 * change).tolist()
    sample = Sample(metric=metric, before=before, after=after, unit="seeds", paired=paired)
    return judge([sample], alpha=0.01, min_effect=0.05)


def simulate_plays(
    seed: int, *, episodes: int, before: float, after: float, paired: bool, noise: float = 0.0
) -> list[MetricComparison]:
    """Return the verdicts on reward and success of one policy per side: rewards are 1 and 0, with noise on top.

    Half of the luck of an episode is its own, and shared where both sides play the same ones.
    """
    generator = np.random.default_rng(seed)
    luck = generator.uniform(size=(2, episodes))
    shared = (generator.uniform(size=episodes) < 0.5) & paired
    luck[1] = np.where(shared, luck[0], luck[1])
    success = [luck[0] < before, luck[1] < after]
    rewards = [side + generator.normal(0.0, noise, episodes) for side in success]
    reward = Metric("play", "reward", 0.0, None, "higher", role="outcome")
    rate = Metric("play", "success_rate", 0.0, None, "higher", Proportion.of(1, 2), role="outcome")
    samples = [
        Sample(metric=metric, before=one.astype(float).tolist(), after=other.astype(float).tolist(), unit="episodes")
        for metric, (one, other) in ((reward, rewards), (rate, success))
    ]
    for sample in samples:
        sample.paired = paired
    return judge(samples, alpha=0.01, min_effect=0.05)


def differ(rows: Sequence[MetricComparison]) -> bool:
    """Return whether any metric is called improved or regressed."""
    return any(row.verdict in ("improved", "regressed") for row in rows)


def unchanged(rows: Sequence[MetricComparison]) -> bool:
    """Return whether any metric is called unchanged."""
    return any(row.verdict == "unchanged" for row in rows)


def share(
    simulate: Callable[[int], list[MetricComparison]], counts: Callable[[Sequence[MetricComparison]], bool], times: int
) -> tuple[int, float]:
    """Return in how many of ``times`` comparisons something was found, and the one-sided 95 % bound of its chance."""
    found = sum(counts(simulate(seed)) for seed in range(times))
    return found, exact_rate_interval(found, times, 0.1)[1]


def _sweep_samples(case: SweepCase, seed: int, pairs: int) -> list[Sample]:
    """Return the first ``pairs`` pairs: more pairs of the same seed begin with the same ones."""
    generator = np.random.default_rng(seed)
    most = max(case.n, pairs)
    swapped = generator.integers(0, 2, most).astype(bool)
    slow = _load(case.load, 2 * most, generator).reshape(most, 2)
    slow[swapped] = slow[swapped, ::-1]
    noise = generator.normal(0.0, case.noise, (METRICS, most, 2))
    if case.load == "two-valued":
        noise = np.where(noise > 0.0, 0.26, 0.0)
    noise[..., 1] += np.log1p(case.change)
    values = np.exp(slow + noise)[:, :pairs]
    return [
        Sample(
            metric=Metric("runtime", f"metric_{index}", 1.0, "s", "lower"),
            before=values[index, :, 0].tolist(),
            after=values[index, :, 1].tolist(),
            unit="runs",
            paired=True,
        )
        for index in range(METRICS)
    ]


def _load(load: Load, runs: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Return the logarithm of how much slower the machine is at each run, in order of time."""
    places = np.arange(runs)
    if load == "drift of 40 %":
        return np.log(1.4) * places / (runs - 1)
    if load in ("every second run", "every fourth run"):
        period = 2 if load == "every second run" else 4
        return 0.3 * (places % period == generator.integers(0, period))
    if load == "autocorrelated":
        found = np.zeros(runs)
        for place in range(1, runs):
            found[place] = 0.9 * found[place - 1] + generator.normal(0.0, 0.05)
        return found
    return np.zeros(runs)


# --- the page ---


@dataclass
class Page:
    """Lines of the page, and what falls short of a bar."""

    times: int
    lines: list[str]
    short: list[str]

    def table(self, title: str, columns: Sequence[str]) -> None:
        """Begin a table."""
        self.write("", f"### {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}")

    def row(self, *cells: str) -> None:
        """Write a row."""
        self.write(f"| {' | '.join(cells)} |")

    def write(self, *lines: str) -> None:
        """Write lines, also to the terminal."""
        self.lines += lines
        print(*lines, sep="\n", flush=True)

    def cell(
        self,
        name: str,
        simulate: Callable[[int], list[MetricComparison]],
        counts: Callable[[Sequence[MetricComparison]], bool],
        bar: float | None,
        *,
        least: bool = False,
    ) -> str:
        """Return a share with its bound; one beyond its bar is noted."""
        found, bound = share(simulate, counts, self.times)
        rate = found / self.times
        if bar is not None and (rate < bar if least else bound > bar):
            self.short.append(f"{name}: {rate:.2%} (bound {bound:.2%}), bar {bar:.1%}")
        return f"{rate:.1%}" if least else f"{rate:.2%} (≤ {bound:.2%})"


def write_page(times: int, sizes: Sequence[int], loads: Sequence[Load]) -> Page:
    """Simulate everything, ``times`` comparisons per cell."""
    page = Page(times, [], [])
    page.write(
        "# How often `compare` is right",
        "",
        f"Simulated by `python scripts/docs/compare_characteristics.py`, {times:,} comparisons per cell, and "
        f"{times // 5:,} in the tables of `--until-decided` and of plays; in brackets the one-sided 95 % bound of the "
        "true chance. Default options: `--alpha 0.01`, `--min-effect 0.05`.",
        "",
        "- A sweep has ten metrics with independent noise of 3 % on a machine whose load is common to all; a false "
        "verdict is any of the ten called improved or regressed although the sides are equal.",
        "- A wrong “unchanged” is a metric called unchanged although side B takes 6 % longer, or fails more often by 6 "
        "points or more.",
        f"- Bars: false verdicts at most {FALSE_BAR:.1%}, wrong “unchanged” at most {UNCHANGED_BAR:.0%} (bounds), "
        f"power for +10 % at 10 pairs at least {POWER_BAR:.0%}.",
    )
    page.table("Sweeps: equal sides called different", ("pairs", *loads))
    for n in sizes:
        cases = [SweepCase(n=n, load=load) for load in loads]
        cells = [
            page.cell(f"sweep {n}, {case.load}", lambda s, c=case: simulate_sweep(c, s), differ, FALSE_BAR)
            for case in cases
        ]
        page.row(str(n), *cells)
    page.table("Sweeps: power for +10 %, wrong “unchanged” at +6 %", ("pairs", "noise", "power", "wrong unchanged"))
    for n in sizes:
        for noise in (0.01, 0.03, 0.1):
            slow, little = (SweepCase(n=n, noise=noise, change=change) for change in (0.1, 0.06))
            bar = POWER_BAR if (n, noise) == (10, 0.03) else None
            power = page.cell(
                f"power {n}, {noise}", lambda s, c=slow: simulate_sweep(c, s)[:1], differ, bar, least=True
            )
            wrong = page.cell(
                f"+6 % {n}, {noise}", lambda s, c=little: simulate_sweep(c, s)[:1], unchanged, UNCHANGED_BAR
            )
            page.row(str(n), f"{noise:.0%}", power, wrong)
    page.times = times // 5
    page.table("`--until-decided`, at most 40 pairs", ("load", "false verdicts", "wrong unchanged at +6 %"))
    for load in loads:
        equal, little = (SweepCase(n=40, load=load, change=change) for change in (0.0, 0.06))
        false = page.cell(f"until decided, {load}", lambda s, c=equal: simulate_until_decided(c, s), differ, FALSE_BAR)
        wrong = page.cell(
            f"until, +6 %, {load}", lambda s, c=little: simulate_until_decided(c, s)[:1], unchanged, UNCHANGED_BAR
        )
        page.row(load, false, wrong)
    page.times = times
    page.table(
        "Trainings, a seed is the unit: equal sides called different", ("seeds", "design", "normal", "two-valued")
    )
    for n in sizes:
        for paired in (True, False):
            cells = [
                page.cell(
                    f"trainings {n}",
                    lambda s, n=n, p=paired, t=two: simulate_trainings(s, n=n, paired=p, two_valued=t),
                    differ,
                    FALSE_BAR,
                )
                for two in (False, True)
            ]
            page.row(str(n), "shared seeds" if paired else "different seeds", *cells)
    page.times = times // 5
    page.table(
        "Plays of one policy per side",
        ("episodes", "design", "equal, called different", "100 % and 90 %, called unchanged", "60 % and 70 %, found"),
    )
    for episodes in (*sizes, 70, 100):
        for paired in (True, False):

            def play(
                seed: int, before: float, after: float, n: int = episodes, p: bool = paired
            ) -> list[MetricComparison]:
                return simulate_plays(seed, episodes=n, before=before, after=after, paired=p)

            name = f"plays {episodes}, {'paired' if paired else 'apart'}"
            page.row(
                str(episodes),
                "the same episodes" if paired else "different episodes",
                page.cell(name, lambda s, f=play: f(s, 0.6, 0.6), differ, FALSE_BAR),
                page.cell(name, lambda s, f=play: f(s, 1.0, 0.9), unchanged, UNCHANGED_BAR),
                page.cell(name, lambda s, f=play: f(s, 0.6, 0.7), differ, None, least=True),
            )
    page.write("", "Beyond their bars: " + ("; ".join(page.short) or "none") + ".")
    return page


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--times", type=int, default=10_000, help="comparisons per cell")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    quick, sizes = arguments.quick, (2, 5, 8, 10, 20)
    page = write_page(400, sizes[::3], LOADS[::3]) if quick else write_page(arguments.times, sizes, LOADS)
    if not quick:
        (ROOT / "docs" / "benchmarks" / "comparison.md").write_text("\n".join(page.lines) + "\n")
    return 1 if arguments.check and page.short else 0


if __name__ == "__main__":
    sys.exit(main())
