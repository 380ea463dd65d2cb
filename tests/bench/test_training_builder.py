"""Training bundles: curves, time split, early stop, whatever has happened when the run ends."""

from __future__ import annotations

import itertools

import pytest
from examples import origin

from headrace.bench import SuccessRule
from headrace.bench.builders import EMA_ALPHA, TrainingBuilder
from headrace.bench.schema import TrainingBundle
from headrace.errors import ConfigError


def builder(**more: object) -> TrainingBuilder:
    """One second passes with every look at the clock."""
    made = TrainingBuilder(clock=itertools.count(0.0).__next__, **more)  # type: ignore[arg-type]  # settings by name
    made.begin()
    return made


def built(made: TrainingBuilder) -> TrainingBundle:
    return made.build(origin("training"))


def test_curves_hold_over_iterations_without_an_episode() -> None:
    made = builder()
    made.iteration(frames=10, collection_s=0.25, learning_s=0.5)
    made.iteration(frames=10, collection_s=0.25, learning_s=0.5, rewards=[4.0, 8.0], lengths=[4, 8])
    made.iteration(frames=10, collection_s=0.25, learning_s=0.5)
    made.iteration(frames=10, collection_s=0.25, learning_s=0.5, rewards=[10.0], lengths=[10])
    learning = built(made).learning
    assert learning.reward is not None
    assert learning.reward.series_per_iter == [None, 6.0, None, 10.0]
    assert learning.reward.series_ema == [None, 6.0, 6.0, 6.0 + EMA_ALPHA * 4.0]
    assert (learning.reward.final_raw, learning.reward.final_ema) == (10.0, 6.0 + EMA_ALPHA * 4.0)
    assert learning.frames == [10, 20, 30, 40]
    assert learning.wall_time_s == [1.0, 2.0, 3.0, 4.0]
    assert learning.episodes == [0, 2, 0, 1]
    assert learning.success_rate is None, "the task has no success measure"


def test_the_time_split_adds_up_to_the_wall_time() -> None:
    made = builder()
    for _ in range(3):
        made.iteration(frames=10, collection_s=0.25, learning_s=0.5)
    bundle = built(made)
    split = bundle.time_split_s
    assert split is not None
    assert (split.collection, split.learning) == (0.5, 1.0), "without the first iteration, the warm-up"
    assert split.collection + split.learning + split.other == bundle.runtime.total_wall_time_s == 3.0
    assert bundle.runtime.total_fps == 20 / 3.0
    assert bundle.runtime.collection_fps == 40.0
    assert bundle.runtime.collection_time_s.samples == [0.25] * 2


def test_a_training_that_never_began_gives_a_valid_bundle() -> None:
    bundle = TrainingBuilder().build(origin("training"))
    assert bundle.runtime.iterations_completed == 0
    assert bundle.learning.reward is None
    assert bundle.success_rate is None
    assert bundle.runtime.total_fps is None


def test_the_rule_stops_once_the_window_is_full_and_good_enough() -> None:
    made = builder(rule=SuccessRule(threshold=0.5, window=3))
    told = [
        made.iteration(
            frames=1, collection_s=0.0, learning_s=0.0, rewards=[0.0] * 2, lengths=[1] * 2, successes=successes
        )
        for successes in ([True, True], [False, False], [False, False], [True, True], [True, False])
    ]
    # windows of three: 2/6, 2/6, then 3/6
    assert told == [False, False, False, False, True]
    assert made.stop_reason is not None
    assert "after iteration 5" in made.stop_reason
    bundle = built(made)
    assert bundle.early_stop is not None
    assert bundle.early_stop.model_dump() == {
        "enabled": True, "success_threshold": 0.5, "success_window": 3, "rule": "mean", "reached": True, "iteration": 5
    }  # fmt: skip
    assert bundle.success_rate is not None
    assert (bundle.success_rate.successes, bundle.success_rate.n) == (3, 6)


def test_success_is_counted_per_episode_not_per_iteration() -> None:
    """One lucky episode in a short iteration does not weigh as much as a hundred in a long one."""
    made = builder(rule=SuccessRule(threshold=0.5, window=2))
    for successes in ([True], [False] * 9):
        stop = made.iteration(
            frames=1,
            collection_s=0.0,
            learning_s=0.0,
            successes=successes,
            rewards=[0.0] * len(successes),
            lengths=[1] * len(successes),
        )
    assert not stop
    assert built(made).success_rate.rate == 0.1  # type: ignore[union-attr]  # None would fail the test as well


def test_rates_are_frames_over_time_not_means_of_rates() -> None:
    """One slow iteration among quick ones: the mean of rates would be 22,964 where 7,125 is true."""
    made = builder()
    for seconds in (0.03, 0.04, 0.05, 0.8):
        made.iteration(frames=1000, collection_s=seconds, learning_s=0.0)
    assert built(made).runtime.collection_fps == pytest.approx(3000 / 0.89)


def test_the_first_iteration_is_the_warm_up_of_the_others() -> None:
    """In curves and counts, not in times."""
    moments = iter([0.0, 10.0, 11.0, 12.0, 12.0])  # begins, three iterations, end
    made = TrainingBuilder(clock=lambda: next(moments))
    made.begin()
    for reward in (1.0, 2.0, 3.0):
        made.iteration(frames=100, collection_s=0.5, learning_s=0.25, rewards=[reward], lengths=[1])
    made.end()
    bundle = built(made)
    runtime = bundle.runtime
    assert (runtime.iterations_completed, runtime.frames, runtime.total_wall_time_s) == (3, 200, 2.0)
    assert runtime.total_fps == 100.0
    assert runtime.iteration_time_s.samples == [1.0, 1.0]
    assert (runtime.warmup.steps, runtime.warmup.seconds, runtime.warmup.steady) == (1, 10.0, None)
    assert bundle.learning.reward.series_per_iter == [1.0, 2.0, 3.0]
    assert bundle.learning.wall_time_s == [10.0, 11.0, 12.0]


def test_a_single_iteration_is_measured() -> None:
    made = builder()
    made.iteration(frames=100, collection_s=0.5, learning_s=0.25)
    assert built(made).runtime.frames == 100
    assert built(made).runtime.warmup is None


def test_isaac_labs_rule_wants_every_iteration_of_the_window() -> None:
    def told(kind: str) -> list[bool]:
        made = builder(rule=SuccessRule(threshold=0.5, window=2, kind=kind))  # type: ignore[arg-type]  # a parameter
        return [
            made.iteration(
                frames=1,
                collection_s=0.0,
                learning_s=0.0,
                rewards=[0.0] * len(successes),
                lengths=[1] * len(successes),
                successes=successes,
            )
            for successes in ([True, True], [False, True, False], [True, False], [], [True], [True])
        ]

    assert told("mean") == [False, True, True, True, True, True]
    assert told("each") == [False, False, False, False, False, True]


def test_the_bundle_names_the_rule() -> None:
    made = builder(rule=SuccessRule(kind="each"))
    assert built(made).early_stop.rule == "each"


def test_without_a_success_measure_the_rule_never_applies() -> None:
    made = builder(rule=SuccessRule(threshold=0.1, window=1))
    assert not made.iteration(frames=1, collection_s=0.0, learning_s=0.0, rewards=[9.0], lengths=[9])


def test_a_reward_that_is_not_finite_is_in_no_mean() -> None:
    made = builder()
    made.iteration(frames=1, collection_s=0, learning_s=0, rewards=[float("nan"), 3.0], lengths=[1, 2])
    made.iteration(frames=1, collection_s=0, learning_s=0, rewards=[float("inf")], lengths=[5])
    learning = built(made).learning
    assert learning.reward is not None
    assert learning.ep_length is not None
    assert (learning.reward.series_per_iter, learning.ep_length.series_per_iter) == ([3.0, None], [1.5, 5.0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: SuccessRule(threshold=1.5), "--success-threshold"),
        (lambda: SuccessRule(window=0), "--success-window"),
        (lambda: TrainingBuilder().iteration(frames=1, collection_s=0, learning_s=0), "begin"),
        (lambda: builder().iteration(frames=1, collection_s=0, learning_s=0, rewards=[1.0]), "as many lengths"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong()  # type: ignore[operator]  # any callable
