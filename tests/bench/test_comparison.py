"""Comparisons that one can trust: equal sides are not called different, true slowdowns are found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from examples import origin, play_bundle, runtime_bundle, startup_bundle, training_bundle
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench import Bundle
from headrace.bench._comparison import CompareCfg, Comparison, compare
from headrace.bench._comparison_output import all_notes
from headrace.bench._significance import holm, least_p, rank_sum_p, shift
from headrace.errors import ConfigError, DataError, UnknownNameError

STEP = "frametime.environment_step_time_s"


def runs(seconds: Sequence[float], side: str, **changes: object) -> list[Bundle]:
    """A run per number, whose four steps took so long each."""
    return [runtime_bundle([s] * 4, run_id=f"{side}{i}", **changes) for i, s in enumerate(seconds)]


def verdict(found: Comparison, path: str = STEP) -> str | None:
    return next(row.verdict for row in found.rows if row.path == path)


# --- the mathematics ---


def brute_force_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided exact p by dealing the labels out in every way."""
    pooled = [*first, *second]
    ranks = [sum(o < v for o in pooled) + (sum(o == v for o in pooled) + 1) / 2 for v in pooled]
    sums = [sum(chosen) for chosen in itertools.combinations(ranks, len(first))]
    observed = sum(ranks[: len(first)])
    below = sum(s <= observed + 1e-9 for s in sums) / len(sums)
    above = sum(s >= observed - 1e-9 for s in sums) / len(sums)
    return min(1.0, 2 * min(below, above))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 6).map(float), min_size=1, max_size=6),
    st.lists(st.integers(0, 6).map(float), min_size=1, max_size=6),
)
def test_the_p_value_is_that_of_dealing_labels_out_in_every_way_ties_included(
    first: list[float], second: list[float]
) -> None:
    # both count the same integers; only their quotient is rounded
    assert rank_sum_p(first, second) == pytest.approx(brute_force_p(first, second), rel=1e-12)


def test_the_p_value_of_separate_samples_is_the_least_there_is() -> None:
    assert rank_sum_p([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert least_p(5, 5) == pytest.approx(2 / 252)


def test_the_shift_is_the_median_difference_and_its_interval_is_that_of_the_rank_test() -> None:
    # the textbook case: n = m = 5 at 95 % leaves out the two smallest and the two largest of 25 differences
    first, second = [1.0, 2.0, 4.0, 8.0, 16.0], [3.0, 5.0, 9.0, 17.0, 33.0]
    differences = sorted(b - a for a in first for b in second)
    found = shift(first, second)
    assert found.estimate == differences[12]
    assert (found.low, found.high) == (differences[2], differences[-3])


def test_the_interval_contains_the_true_shift_in_95_of_100_samples() -> None:
    generator = np.random.default_rng(0)
    inside = 0
    for _ in range(1000):
        found = shift(generator.normal(size=8).tolist(), generator.normal(0.7, size=8).tolist())
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= 0.7 <= found.high
    # exact tests are conservative; three standard deviations of 1,000 draws are 2 %
    assert inside >= 930


def test_there_is_no_interval_of_two_runs() -> None:
    assert shift([1.0, 2.0], [3.0, 4.0]).low is None


def test_holm_multiplies_the_smallest_by_all_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


# --- verdicts ---


def simulated(seed: int, *, slowdown: float, noise: float, count: int = 10) -> Comparison:
    """Two sides of runs whose metrics each vary by themselves from run to run."""
    generator = np.random.default_rng(seed)

    def side(name: str, factor: float) -> list[Bundle]:
        return [_noisy(f"{name}{i}", generator, noise, factor) for i in range(count)]

    return compare(side("a", 1.0), side("b", slowdown))


def _noisy(run_id: str, generator: np.random.Generator, noise: float, factor: float) -> Bundle:
    """A run without the cost of statistics: only what a comparison reads."""
    bundle = TEMPLATE.model_copy(update={"run": TEMPLATE.run.model_copy(update={"run_id": run_id})})
    draw = iter(np.exp(generator.normal(0.0, noise, 16)) * factor)
    runtime = bundle.runtime
    timing = runtime.environment_step_timing
    names = ("environment_step_time_s", "simulation_step_time_s", "render_step_time_s", "task_step_time_s")
    timing = timing.model_copy(
        update={n: getattr(timing, n).model_copy(update={"mean": getattr(timing, n).mean * next(draw)}) for n in names}
    )
    startup = runtime.startup_time_s
    phases = ("python_imports", "task_config", "env_creation", "first_step")
    startup = startup.model_copy(update={name: getattr(startup, name) * next(draw) for name in phases})
    changes = {
        "environment_step_timing": timing,
        "startup_time_s": startup,
        "throughput_fps": runtime.throughput_fps / next(draw),
        "iteration_time_s": runtime.iteration_time_s.model_copy(update={"mean": 0.5 * next(draw)}),
    }
    return bundle.model_copy(update={"runtime": runtime.model_copy(update=changes)})


TEMPLATE = runtime_bundle()


@pytest.mark.parametrize("noise", [0.03, 0.30])
def test_equal_sides_are_called_regressed_in_at_most_1_of_100_comparisons(noise: float) -> None:
    """1,000 pairs of sides, ten metrics each; a comparison counts as wrong if any metric is called regressed."""
    wrong = sum(simulated(seed, slowdown=1.0, noise=noise).count("regressed") > 0 for seed in range(1000))
    assert wrong <= 10


def test_a_slowdown_of_10_percent_is_found_in_at_least_95_of_100_comparisons() -> None:
    found = [simulated(seed, slowdown=1.10, noise=0.03) for seed in range(300)]
    for path in (STEP, "runtime.throughput_fps", "startup.env_creation"):
        power = sum(verdict(comparison, path) == "regressed" for comparison in found) / len(found)
        assert power >= 0.95, path


def test_a_slowdown_of_2_percent_is_not_called_regressed_however_significant() -> None:
    found = compare(runs(np.linspace(1.0, 1.001, 12), "a"), runs(np.linspace(1.02, 1.021, 12), "b"))
    row = next(row for row in found.rows if row.path == STEP)
    assert row.verdict == "unchanged"
    assert row.p is not None
    assert row.p < 0.01


def test_a_run_compared_with_itself_is_unchanged() -> None:
    side = runs([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0], "a")
    found = compare(side, side)
    assert found.count("regressed") == found.count("improved") == 0
    assert verdict(found) == "unchanged"


def test_one_run_a_side_is_inconclusive_always() -> None:
    found = compare(runs([1.0], "a"), runs([9.0], "b"))
    assert {row.verdict for row in found.rows} <= {"inconclusive", None}
    assert "one run a side" in found.rows[0].reason


def test_steps_are_never_taken_for_runs() -> None:
    """A thousand steps of one run stay one value."""
    found = compare([runtime_bundle([1.0] * 1000, run_id="a")], [runtime_bundle([2.0] * 1000, run_id="b")])
    row = next(row for row in found.rows if row.path == STEP)
    assert (len(row.before), len(row.after)) == (1, 1)


def test_too_few_runs_are_told_how_many_it_takes() -> None:
    found = compare(runs([1.0, 1.0, 1.0], "a"), runs([2.0, 2.0, 2.0], "b"))
    row = next(row for row in found.rows if row.path == STEP)
    assert row.verdict == "inconclusive"
    assert "use 7 a side" in row.reason
    assert verdict(compare(runs([1.0] * 7, "a"), runs([2.0] * 7, "b"))) == "regressed"


def test_fewer_metrics_need_fewer_runs() -> None:
    cfg = CompareCfg(metrics=(STEP,))
    assert verdict(compare(runs([1.0] * 5, "a"), runs([2.0] * 5, "b"), cfg)) == "regressed"


def test_more_frames_per_second_are_an_improvement_and_less_time_is_one() -> None:
    found = compare(runs([2.0] * 8, "a"), runs([1.0] * 8, "b"))
    assert verdict(found) == "improved"
    assert verdict(found, "runtime.throughput_fps") == "improved"
    assert verdict(found, "runtime.total_wall_time_s") is None


def test_time_and_rate_of_the_same_thing_get_the_same_verdict() -> None:
    """5 % more time is 4.8 % fewer frames; both are at the edge, so ratios are judged alike both ways."""
    found = compare(runs([1.0] * 8, "a"), runs([1.0501] * 8, "b"))
    assert verdict(found) == verdict(found, "runtime.throughput_fps") == "regressed"
    found = compare(runs([1.0] * 8, "a"), runs([1.0499] * 8, "b"))
    assert verdict(found) == verdict(found, "runtime.throughput_fps") == "unchanged"


def test_rates_are_compared_in_points() -> None:
    def side(rate: float, name: str) -> list[Bundle]:
        plays = [play_bundle(run_id=f"{name}{i}") for i in range(8)]
        return [
            play.model_copy(update={"success_rate": play.success_rate.model_copy(update={"rate": rate + i / 1e4})})
            for i, play in enumerate(plays)
        ]

    row = next(r for r in compare(side(0.02, "a"), side(0.04, "b")).rows if r.path == "play.success_rate")
    assert row.effect == pytest.approx(0.02)
    assert row.verdict == "unchanged", "twice as often, but by two points"


def test_a_change_relative_to_zero_is_inconclusive() -> None:
    def side(reward: float, name: str) -> list[Bundle]:
        plays = [play_bundle(run_id=f"{name}{i}") for i in range(8)]
        return [p.model_copy(update={"reward": p.reward.model_copy(update={"mean": reward})}) for p in plays]

    row = next(r for r in compare(side(0.0, "a"), side(1.0, "b")).rows if r.path == "play.reward")
    assert (row.effect, row.verdict) == (None, "inconclusive")
    row = next(r for r in compare(side(-1.0, "a"), side(-2.0, "b")).rows if r.path == "play.reward")
    assert row.effect == pytest.approx(-1.0)
    assert row.verdict == "regressed"


# --- what is refused, and what is told ---


@pytest.mark.parametrize(
    ("difference", "word", "changed"),
    [
        ("task", "task: cartpole and ant", {"task": "ant"}),
        ("settings", "num_envs: 4 and 8", {"num_envs": 8}),
        ("library", "library: None and skrl", {"framework": "skrl"}),
    ],
)
def test_other_runs_are_refused_unless_told_otherwise(difference: str, word: str, changed: dict[str, object]) -> None:
    before, after = runs([1.0], "a"), runs([1.0], "b", **changed)
    with pytest.raises(ConfigError, match=word) as caught:
        compare(before, after)
    assert f"--allow {difference}" in str(caught.value)
    compare(before, after, CompareCfg(allow=frozenset({difference})))  # type: ignore[arg-type]  # difference comes from a parameter, as text


def test_other_hardware_and_timing_are_refused() -> None:
    before = runtime_bundle(run_id="a")
    other = runtime_bundle(run_id="b")
    faster = other.model_copy(update={"hardware": other.hardware.model_copy(update={"cpu_count": 64})})
    with pytest.raises(ConfigError, match="cpu_count: 2 and 64"):
        compare([before], [faster])
    timing = other.runtime.environment_step_timing.model_copy(update={"measurement_mode": "synchronized"})
    synced = other.model_copy(update={"runtime": other.runtime.model_copy(update={"environment_step_timing": timing})})
    with pytest.raises(ConfigError, match="--allow timing"):
        compare([before], [synced])


def test_another_host_name_is_no_other_hardware() -> None:
    other = runtime_bundle(run_id="b")
    moved = other.model_copy(update={"hardware": other.hardware.model_copy(update={"hostname": "runner-7"})})
    compare([runtime_bundle(run_id="a")], [moved])


def test_runs_of_one_side_must_be_alike_too() -> None:
    with pytest.raises(ConfigError, match="num_envs: 4 and 8"):
        compare([*runs([1.0], "a"), *runs([1.0], "c", num_envs=8)], runs([1.0], "b"))


def test_a_run_twice_on_one_side_is_refused() -> None:
    with pytest.raises(DataError, match="a0 more than once"):
        compare(runs([1.0], "a") * 2, runs([1.0], "b"))


def test_a_crashed_run_is_left_out_named_and_closes_the_gate() -> None:
    crashed = runtime_bundle(run_id="b9", status="crashed", status_reason="boom")
    found = compare(runs([1.0, 1.0], "a"), [*runs([1.0, 1.0], "b"), crashed])
    assert any("b9 is left out: crashed (boom)" in note for note in found.notes)
    assert found.failed_after == 1
    assert found.regressed
    with pytest.raises(DataError, match="expected a completed run"):
        compare(runs([1.0], "a"), [crashed])


def test_what_only_one_side_has_is_named() -> None:
    bare = runtime_bundle(run_id="b")
    startup = bare.runtime.startup_time_s.model_copy(update={"first_step": None})
    bare = bare.model_copy(update={"runtime": bare.runtime.model_copy(update={"startup_time_s": startup})})
    found = compare([runtime_bundle(run_id="a")], [bare])
    assert found.only_before == ["startup.first_step"]
    assert found.only_after == []
    assert compare([bare], [runtime_bundle(run_id="a")]).only_after == ["startup.first_step"]


def test_sides_that_did_not_take_turns_are_told_so() -> None:
    late = runs([1.0, 1.0], "b", start_time_utc="2026-01-02T12:00:00.000Z")
    assert any("headrace sweep" in note for note in compare(runs([1.0, 1.0], "a"), late).notes)


def test_an_unknown_metric_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match="throughput_fps"):
        compare(runs([1.0], "a"), runs([1.0], "b"), CompareCfg(metrics=("runtime.thruput_fps",)))


@pytest.mark.parametrize("make", [training_bundle, play_bundle, startup_bundle])
def test_every_kind_can_be_compared(make: object) -> None:
    before = [make(run_id=f"a{i}") for i in range(8)]  # type: ignore[operator]  # any callable
    found = compare(before, [make(run_id=f"b{i}") for i in range(8)])  # type: ignore[operator]  # any callable
    assert found.rows
    assert found.count("unchanged") == sum(row.better is not None for row in found.rows)
    assert not found.regressed


def test_a_reason_that_holds_for_every_metric_does_not_name_them_again() -> None:
    found = compare(runs([1.0], "a"), runs([2.0], "b"))
    (note,) = (note for note in all_notes(found) if note.startswith("inconclusive"))
    assert note.startswith(f"inconclusive: all {found.count('inconclusive')} metrics: ")
    assert "throughput_fps" not in note


def test_kinds_are_not_mixed() -> None:
    with pytest.raises(DataError, match="one kind"):
        compare([runtime_bundle(), startup_bundle()], [runtime_bundle()])


def test_the_example_is_what_it_says() -> None:
    assert origin().run.seed == 0
    assert not math.isnan(TEMPLATE.runtime.throughput_fps)
