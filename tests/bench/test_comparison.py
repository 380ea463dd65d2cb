"""Comparisons that one can trust: equal sides are not called different, true slowdowns are found."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
import pytest
from examples import STEP, play_bundle, runtime_bundle, startup_bundle, training_bundle, verdict
from rich.console import Console

from headrace.bench.comparing import all_notes, table
from headrace.bench.comparison import CompareCfg, compare
from headrace.bench.schema import Bundle, ResumedFrom
from headrace.errors import ConfigError, DataError, UnknownNameError

DRIFT = CompareCfg(accept_drift=True)


def runs(seconds: Sequence[float], side: str, **changes: object) -> list[Bundle]:
    """A run per number, whose four steps took so long each."""
    return [runtime_bundle([s] * 4, run_id=f"{side}{i}", **changes) for i, s in enumerate(seconds)]


def in_turns(
    before: Sequence[float], after: Sequence[float], order_seed: int | None = 0, **changes: object
) -> tuple[list[Bundle], list[Bundle]]:
    """Runs of a sweep whose steps took so long; its order was drawn if it has a seed."""
    sides: tuple[list[Bundle], list[Bundle]] = ([], [])
    for number, pair in enumerate(zip(before, after, strict=True)):
        for side, seconds in enumerate(pair):
            identity = {"sweep_id": "s", "repetition": number, "order_seed": order_seed}
            sides[side].append(runtime_bundle([seconds] * 4, run_id=f"{'ab'[side]}{number}", **identity, **changes))
    return sides


# --- verdicts ---


def test_a_slowdown_of_2_percent_is_not_called_regressed_however_significant() -> None:
    found = compare(*in_turns(np.linspace(1.0, 1.001, 12), np.linspace(1.02, 1.021, 12)))
    row = next(row for row in found.rows if row.path == STEP)
    assert row.verdict == "unchanged"
    assert row.p is not None
    assert row.p < 0.01


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_numbers_near_the_largest_there_is_are_compared() -> None:
    found = compare(*in_turns([1e-5] * 10, [1e305] * 10))
    assert verdict(found) == "regressed"
    assert all(row.effect is None or math.isfinite(row.effect) for row in found.rows)


def test_a_run_compared_with_itself_is_unchanged() -> None:
    side = runs([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0], "a")
    found = compare(side, side, DRIFT)
    assert found.count("regressed") == found.count("improved") == 0
    assert verdict(found) == "unchanged"


def test_one_run_per_side_is_inconclusive_always_and_says_what_to_run() -> None:
    found = compare(runs([1.0], "a"), runs([9.0], "b"))
    assert {row.verdict for row in found.rows} <= {"inconclusive", None}
    assert "one run per side" in found.rows[0].reason
    assert "headrace sweep … --repeats 10" in found.rows[0].reason


def test_steps_are_never_taken_for_runs() -> None:
    """A thousand steps of one run stay one value."""
    found = compare([runtime_bundle([1.0] * 1000, run_id="a")], [runtime_bundle([2.0] * 1000, run_id="b")])
    row = next(row for row in found.rows if row.path == STEP)
    assert (len(row.sample.before), len(row.sample.after)) == (1, 1)


def test_too_few_runs_are_told_how_many_it_takes() -> None:
    found = compare(*in_turns([1.0] * 7, [24.0] * 7))
    row = next(row for row in found.rows if row.path == STEP)
    assert row.verdict == "inconclusive"
    assert "--repeats 8" in row.reason
    assert verdict(compare(*in_turns([1.0] * 8, [24.0] * 8))) == "regressed"


def test_a_machine_that_is_too_busy_is_named_instead_of_thousands_of_repeats() -> None:
    noise = np.exp(np.random.default_rng(0).normal(0, 1.0, (2, 10)))
    row = next(row for row in compare(*in_turns(*noise)).rows if row.path == STEP)
    assert "too busy" in row.reason
    assert "--repeats" not in row.reason


def test_more_frames_per_second_are_an_improvement_and_less_time_is_one() -> None:
    found = compare(*in_turns([2.0] * 8, [1.0] * 8))
    assert verdict(found) == "improved"
    assert verdict(found, "runtime.total_fps") == "improved"
    assert verdict(found, "runtime.total_wall_time_s") is None


def test_time_and_rate_of_the_same_thing_get_the_same_verdict() -> None:
    """5 % more time is 4.8 % fewer frames; both are at the edge, so ratios are judged alike both ways."""
    found = compare(*in_turns([1.0] * 8, [1.0501] * 8))
    assert verdict(found) == verdict(found, "runtime.total_fps") == "regressed"
    found = compare(*in_turns([1.0] * 8, [1.0499] * 8))
    assert verdict(found) == verdict(found, "runtime.total_fps") == "unchanged"


# --- runs in turn ---


def test_a_sweep_is_compared_pair_by_pair_so_drift_does_not_hide_a_change() -> None:
    drift = np.linspace(1.0, 1.4, 12)
    found = compare(*in_turns(drift, 1.06 * drift), CompareCfg(metrics=(STEP,)))
    (row,) = found.rows
    assert row.verdict == "regressed"
    assert row.effect == pytest.approx(0.06)
    assert row.test == "sign flips, 12 pairs of runs"


def test_a_run_without_its_partner_is_not_used() -> None:
    before, after = in_turns([1.0] * 9, [2.0] * 9)
    row = next(row for row in compare(before[1:], after).rows if row.path == STEP)
    assert (len(row.sample.before), len(row.sample.after), row.verdict) == (8, 8, "regressed")


@pytest.mark.parametrize("sides", [(runs([1.0] * 8, "a"), runs([2.0] * 8, "b")), in_turns([1.0] * 8, [2.0] * 8, None)])
def test_times_get_no_verdict_unless_their_order_was_drawn_at_random(sides: tuple[list[Bundle], list[Bundle]]) -> None:
    row = next(row for row in compare(*sides).rows if row.path == STEP)
    assert row.verdict == "inconclusive"
    assert "headrace sweep" in row.reason
    assert "--accept-drift" in row.reason
    assert verdict(compare(*sides, DRIFT)) == "regressed"


def test_a_commit_that_cannot_record_the_seed_is_known_by_the_id_of_its_sweep() -> None:
    def older(runs: list[Bundle]) -> list[Bundle]:
        changed = {"sweep_id": "sweep-1-order7", "order_seed": None}
        return [run.model_copy(update={"run": run.run.model_copy(update=changed)}) for run in runs]

    before, after = in_turns([1.0] * 8, [2.0] * 8)
    assert verdict(compare(older(before), older(after))) == "regressed"


def test_several_looks_need_more_evidence_each() -> None:
    sides = in_turns([1.0] * 8, [2.0] * 8)
    assert verdict(compare(*sides, CompareCfg(looks=5))) == "inconclusive"
    sides = in_turns([1.0] * 10, [2.0] * 10)
    assert verdict(compare(*sides, CompareCfg(looks=5))) == "regressed"


def test_pairs_that_were_not_warm_are_left_out_of_times_where_enough_others_are() -> None:
    def cold(run: Bundle) -> Bundle:
        warmup = run.runtime.warmup.model_copy(update={"steady": False})
        return run.model_copy(update={"runtime": run.runtime.model_copy(update={"warmup": warmup})})

    before, after = in_turns([1.0] * 9, [2.0] * 9)
    found = compare([cold(before[0]), *before[1:]], after)
    assert len(next(row for row in found.rows if row.path == STEP).sample.before) == 8
    assert any("steady" in note for note in found.notes)
    # a side that never becomes steady may be the slow one: its order was drawn all the same
    found = compare(before, [cold(run) for run in after])
    assert len(next(row for row in found.rows if row.path == STEP).sample.before) == 9
    assert found.count("regressed")


def test_batches_of_different_sizes_are_compared_per_frame() -> None:
    """Four times the environments in three times the time: each frame is cheaper, though each batch takes longer."""
    before, _ = in_turns([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01], [1.0] * 8)
    _, after = in_turns([1.0] * 8, [3.0, 3.01, 2.99, 3.0, 3.02, 2.98, 3.0, 3.01])
    after = [
        run.model_copy(
            update={
                "run": run.run.model_copy(update={"num_envs": 16}),
                "runtime": run.runtime.model_copy(
                    update={"steps_per_iteration": 16, "total_fps": run.runtime.total_fps * 4}
                ),
            }
        )
        for run in after
    ]
    found = compare(before, after, CompareCfg(allow={"settings"}))
    assert not found.count("regressed")
    assert verdict(found, f"{STEP}_per_frame") == "improved"
    assert verdict(found, "runtime.total_fps") == "improved"
    assert verdict(found, "runtime.ram_gb_peak") is None
    assert STEP not in {row.path for row in found.rows}


# --- outcomes ---


def trainings(rewards: Sequence[float], side: str, *, seeds: Sequence[int] | None = None) -> list[Bundle]:
    return [
        run.model_copy(
            update={
                "learning": run.learning.model_copy(
                    update={"reward": run.learning.reward.model_copy(update={"final_ema": reward})}
                )
            }
        )
        for i, reward in enumerate(rewards)
        for run in [training_bundle(run_id=f"{side}{i}", seed=i if seeds is None else seeds[i])]
    ]


REWARD = "train.reward_final_ema"


def test_runs_with_the_same_settings_and_seed_are_one_observation_of_an_outcome() -> None:
    """Four outcomes counted seven times each are still four outcomes."""
    generator = np.random.default_rng(0)
    before, after = generator.normal(100, 20, 4), generator.normal(110, 20, 4)
    seeds = [seed for seed in range(4) for _ in range(7)]
    sides = [
        trainings([values[seed] for seed in seeds], side, seeds=seeds) for values, side in ((before, "a"), (after, "b"))
    ]
    row = next(row for row in compare(*sides).rows if row.path == REWARD)
    assert (len(row.sample.before), len(row.sample.after)) == (4, 4)
    assert row.verdict == "inconclusive"
    assert row.test == "sign flips, 4 pairs of seeds"


def test_outcomes_do_not_depend_on_when_they_were_made() -> None:
    before = trainings([100.0 + i % 3 for i in range(10)], "a")
    after = trainings([130.0 + i % 3 for i in range(10)], "b")
    late = [
        run.model_copy(update={"run": run.run.model_copy(update={"start_time_utc": "2026-01-02T12:00:00.000Z"})})
        for run in after
    ]
    found = compare(before, late)
    assert verdict(found, REWARD) == "improved"
    assert verdict(found, "train.collection_fps") == "inconclusive"


def test_replicates_of_times_stay_replicates() -> None:
    row = next(row for row in compare(runs([1.0] * 8, "a"), runs([2.0] * 8, "b"), DRIFT).rows if row.path == STEP)
    assert (len(row.sample.before), row.verdict) == (8, "regressed")


def stopped(seconds: Sequence[tuple[float, bool]], side: str) -> list[Bundle]:
    """Trainings that took so long and reached success, or did not."""
    return [
        run.model_copy(
            update={
                "early_stop": run.early_stop.model_copy(update={"reached": reached}),
                "runtime": run.runtime.model_copy(update={"total_wall_time_s": value}),
            }
        )
        for i, (value, reached) in enumerate(seconds)
        for run in [training_bundle(run_id=f"{side}{i}", seed=i)]
    ]


def test_runs_that_never_reach_success_leave_the_time_to_it_without_a_verdict() -> None:
    cfg = CompareCfg(metrics=("train.time_to_success_s",), accept_drift=True)
    before = stopped([(50.0 + i, True) for i in range(10)], "a")
    after = stopped([(40.0, True)] + [(100.0, False)] * 9, "b")
    for sides in ((before, after), (after, before)):
        (row,) = compare(*sides, cfg).rows
        assert row.verdict == "inconclusive"
        assert "missing in 9 of 10" in row.reason
    (row,) = compare(before, stopped([(90.0 + i, True) for i in range(10)], "b"), cfg).rows
    assert row.verdict == "regressed"


def test_a_resumed_training_has_no_time_to_success() -> None:
    """Its clock began where the other run had ended: it would look fast."""
    before, after = stopped([(50.0 + i, True) for i in range(10)], "a"), stopped([(9.0, True)] * 10, "b")
    came_from = ResumedFrom(path="runs/a/last.pt", run_id="a0", iteration=50)
    after = [run.model_copy(update={"run": run.run.model_copy(update={"resumed_from": came_from})}) for run in after]
    found = compare(before, after)
    assert "train.time_to_success_s" in found.only_before


def test_a_metric_that_some_runs_lack_gets_no_verdict() -> None:
    before, after = trainings([1.0] * 8, "a"), trainings([9.0] * 8, "b")
    after[0] = after[0].model_copy(update={"learning": after[0].learning.model_copy(update={"reward": None})})
    row = next(row for row in compare(before, after).rows if row.path == REWARD)
    assert (row.verdict, row.reason) == ("inconclusive", "missing in 1 of 8 seeds of side B")


# --- the interval decides ---


def test_a_true_change_of_exactly_the_smallest_that_matters_is_called() -> None:
    generator = np.random.default_rng(0)
    factors = np.exp(generator.normal(0, 0.01, (2, 20)))
    (row,) = compare(*in_turns(factors[0], 1.05 * factors[1]), CompareCfg(metrics=(STEP,))).rows
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


def test_strict_evaluations_may_differ_in_the_number_of_environments() -> None:
    """Then it changes nothing that is compared."""

    def strict(run: Bundle) -> Bundle:
        config = run.run.config.model_copy(update={"playing": {"strict_size": 1}})
        return run.model_copy(update={"run": run.run.model_copy(update={"config": config})})

    compare([strict(play_bundle(run_id="a"))], [strict(play_bundle(run_id="b", num_envs=64))])
    with pytest.raises(ConfigError, match="num_envs"):
        compare([play_bundle(run_id="a")], [play_bundle(run_id="b", num_envs=64)])


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


def test_an_unknown_metric_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match="total_fps"):
        compare(runs([1.0], "a"), runs([1.0], "b"), CompareCfg(metrics=("runtime.totl_fps",)))


@pytest.mark.parametrize("make", [training_bundle, play_bundle, startup_bundle])
def test_every_kind_can_be_compared(make: object) -> None:
    before = [make(run_id=f"a{i}", seed=i) for i in range(8)]  # type: ignore[operator]  # any callable
    found = compare(before, [make(run_id=f"b{i}", seed=i) for i in range(8)], DRIFT)  # type: ignore[operator]  # any callable
    assert found.rows
    # eight equal outcomes leave open what was not seen
    open_rows = {"play.success_rate", "play.reward", REWARD, "train.success_rate"}
    decided = [row for row in found.rows if row.sample.metric.better is not None and row.path not in open_rows]
    assert {row.verdict for row in decided} == {"unchanged"}
    assert not found.regressed


def test_a_reason_that_holds_for_every_metric_does_not_name_them_again() -> None:
    found = compare(runs([1.0], "a"), runs([2.0], "b"))
    (note,) = (note for note in all_notes(found) if note.startswith("inconclusive"))
    assert note.startswith(f"inconclusive: all {found.count('inconclusive')} metrics: ")
    assert "total_fps" not in note


def test_names_are_whole_in_a_table_of_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(
        table(compare([training_bundle()], [training_bundle(run_id="b")]), ("num-envs=1024", "num-envs=4096"))
    )
    assert "…" not in console.export_text()


def test_kinds_are_not_mixed() -> None:
    with pytest.raises(DataError, match="one kind"):
        compare([runtime_bundle(), startup_bundle()], [runtime_bundle()])
