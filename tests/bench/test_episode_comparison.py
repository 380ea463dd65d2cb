"""Comparisons of plays: episode by episode where both sides played the same, as sets or counts where not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from examples import play_bundle, verdict

from headrace.bench.comparing import change
from headrace.bench.comparison import CompareCfg, compare
from headrace.bench.schema import Bundle, PerEpisode


def play(
    rewards: Sequence[float],
    successes: Sequence[bool],
    name: str,
    *,
    ids: Sequence[int] | None = None,
    policy: str | None = None,
    **changes: object,
) -> Bundle:
    made = play_bundle(run_id=name, **changes)
    rows = PerEpisode(
        episode_ids=list(range(len(rewards)) if ids is None else ids),
        rewards=list(rewards),
        lengths=[5] * len(rewards),
        successes=list(successes),
    )
    checkpoint = made.checkpoint.model_copy(update={"sha256": policy or name})
    return made.model_copy(update={"per_episode": rows, "checkpoint": checkpoint})


def test_one_play_per_side_is_compared_episode_by_episode() -> None:
    before = [i % 20 != 0 for i in range(1000)]  # 95 %
    after = [i % 5 < 3 for i in range(1000)]  # 60 %
    found = compare([play([1.0] * 1000, before, "a")], [play([1.0] * 1000, after, "b")])
    row = next(row for row in found.rows if row.path == "play.success_rate")
    assert (row.verdict, row.test) == ("regressed", "sign flips, 1,000 pairs of episodes")
    assert row.effect == pytest.approx(-0.35)
    assert row.sample.centers == pytest.approx((0.95, 0.6))
    assert verdict(found, "play.reward") == "unchanged"
    assert verdict(found) == "inconclusive", "one run per side says nothing about times"


def test_bundles_without_episodes_get_no_verdict_on_outcomes() -> None:
    made = [play_bundle(run_id=name).model_copy(update={"per_episode": None}) for name in ("a", "b")]
    row = next(r for r in compare(made[:1], made[1:]).rows if r.path == "play.success_rate")
    assert row.verdict == "inconclusive"
    assert "do not keep every episode" in row.reason


def test_different_episodes_are_compared_as_two_sets() -> None:
    generator = np.random.default_rng(0)
    before = play(generator.normal(10, 1, 200), [True] * 200, "a")
    after = play(generator.normal(12, 1, 200), [True] * 200, "b", ids=range(1000, 1200))
    row = next(r for r in compare([before], [after]).rows if r.path == "play.reward")
    assert (row.verdict, row.test) == ("improved", "relabeling, 200 and 200 episodes")


def test_pairing_finds_what_the_difficulty_of_episodes_hides() -> None:
    hard = np.random.default_rng(0).normal(100, 40, 200)
    before, after = play(hard, [True] * 200, "a"), play(hard + 6.0, [True] * 200, "b")
    assert verdict(compare([before], [after]), "play.reward") == "improved"
    mixed = play(hard[::-1] + 6.0, [True] * 200, "d", ids=range(199, -1, -1))
    assert verdict(compare([before], [mixed]), "play.reward") == "improved", "by id, not by place"
    apart = play(hard + 6.0, [True] * 200, "c", ids=range(1000, 1200))
    assert verdict(compare([before], [apart]), "play.reward") == "inconclusive"


def test_the_same_play_seven_times_is_one_play() -> None:
    rewards, successes = [1.0, 2.0, 3.0, 4.0], [True, False, True, True]
    before = [play(rewards, successes, f"a{i}", policy="one") for i in range(7)]
    after = [play([r + 1 for r in rewards], [True] * 4, f"b{i}", policy="two") for i in range(7)]
    row = next(r for r in compare(before, after).rows if r.path == "play.success_rate")
    assert len(row.sample.before) == 4
    assert row.verdict == "inconclusive"


def test_several_policies_per_side_are_the_units_not_their_episodes() -> None:
    """Five trainings each: a thousand episodes of one policy say nothing about the next training."""
    before = [play([10.0 + i] * 1000, [True] * 1000, f"a{i}") for i in range(5)]
    after = [play([12.0 + i] * 1000, [True] * 1000, f"b{i}") for i in range(5)]
    row = next(r for r in compare(before, after).rows if r.path == "play.success_rate")
    assert len(row.sample.before) == 5
    assert "policies" in row.test


def test_plays_that_cut_episodes_off_get_no_verdict() -> None:
    made = play([1.0] * 50, [True] * 50, "a")
    plan = made.plan.model_copy(update={"kind": "steps", "shorter_than_episode": True})
    sides = [[made.model_copy(update={"plan": plan})], [play([2.0] * 50, [False] * 50, "b")]]
    found = compare(*sides, CompareCfg(allow={"settings"}))
    assert verdict(found, "play.success_rate") == "inconclusive"


def test_plays_of_several_policies_that_cut_episodes_off_get_no_verdict_either() -> None:
    def side(name: str, rewards: list[float]) -> list[Bundle]:
        plays = [play([reward] * 50, [True] * 50, f"{name}{i}") for i, reward in enumerate(rewards)]
        plan = plays[0].plan.model_copy(update={"kind": "steps", "shorter_than_episode": True})
        return [made.model_copy(update={"plan": plan}) for made in plays]

    found = compare(side("a", [1.0 + i for i in range(12)]), side("b", [50.0 + i for i in range(12)]))
    row = next(row for row in found.rows if row.path == "play.reward")
    assert row.verdict == "inconclusive"
    assert "--episodes" in row.reason


def test_outcomes_near_zero_are_compared_by_their_difference_not_in_percent() -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(0, 1, 1000)
    before, after = play(0.01 + noise, [True] * 1000, "a"), play(1.24 + noise, [True] * 1000, "b")
    row = next(r for r in compare([before], [after]).rows if r.path == "play.reward")
    assert (row.verdict, row.sample.scale) == ("improved", "absolute")
    assert row.effect == pytest.approx(1.23)
    assert change(row) == "+1.23"
    near = play(0.012 + noise, [True] * 1000, "c")
    assert verdict(compare([before], [near]), "play.reward") == "unchanged", "0.002 is nothing at a spread of 1"


@pytest.mark.parametrize("count", [2, 10, 20, 70])
def test_episodes_that_are_all_alike_are_not_called_unchanged_before_there_are_enough(count: int) -> None:
    """A policy that fails in one episode of twenty shows none in 70 with a chance of 3 %."""
    found = compare([play([1.0] * count, [True] * count, "a")], [play([1.0] * count, [True] * count, "b")])
    assert verdict(found, "play.reward") == verdict(found, "play.success_rate") == "inconclusive"
    enough = [play([1.0] * 80, [True] * 80, name) for name in "ab"]
    assert verdict(compare(enough[:1], enough[1:]), "play.reward") == "unchanged"
    assert verdict(compare(enough[:1], enough[1:]), "play.success_rate") == "unchanged"


def test_two_episodes_whose_rewards_differ_alike_are_no_evidence() -> None:
    found = compare([play([1.0, 1.0], [True] * 2, "a")], [play([0.0, 0.0], [False] * 2, "b")])
    row = next(row for row in found.rows if row.path == "play.reward")
    assert (row.verdict, row.p) == ("inconclusive", 0.5)
