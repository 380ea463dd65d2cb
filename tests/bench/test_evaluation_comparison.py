"""Evaluations in comparisons and reports: paired by episode id, judged only where the plan is completed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.bench import read_bundle
from headrace.bench.comparing import ComparisonResult
from headrace.cli import main
from headrace.errors import ConfigError, DataError
from headrace.evaluation import Evaluation
from headrace.evaluation._journal import Header, Journal
from headrace.evaluation._result import Counters, EpisodeResult

IDENTITY = {
    "source": "pusher-solid",
    "overrides": {"episode_length": 50},
    "seed": 3,
    "policy": "one",
    "execute": 8,
    "latency": 0,
    "strict_size": 16,
    "fidelity": "native",
}
CIRCUMSTANCES = {"num_envs": 16, "torch": "2.13.0", "headrace": "0.2", "python": "3.12", "processor": "a chip"}


def rows(successes: Sequence[bool], rewards: Sequence[float] | None = None, first: int = 0) -> list[EpisodeResult]:
    return [
        EpisodeResult(
            episode_id=first + i,
            seed=3,
            reward=float(i) if rewards is None else float(rewards[i]),
            length=50,
            success=bool(success),
            diverged=False,
        )
        for i, success in enumerate(successes)
    ]


def evaluation(found: list[EpisodeResult], *, planned: Iterable[int] | None = None, **identity: object) -> Evaluation:
    plan = tuple(row.episode_id for row in found) if planned is None else tuple(planned)
    return Evaluation(
        episodes=found,
        plan=plan,
        status="completed" if len(plan) == len(found) else "interrupted",
        counters=Counters(),
        strict_size=16,
        identity=IDENTITY | identity,
        circumstances=CIRCUMSTANCES,
    )


GOOD = [i % 20 != 0 for i in range(400)]
"""95 %."""
BAD = [i % 5 < 3 for i in range(400)]
"""60 %."""


def success_of(found: ComparisonResult):
    (comparison,) = found.comparisons
    return next(row for row in comparison.rows if row.path == "play.success_rate")


def test_two_evaluations_are_compared_episode_by_episode() -> None:
    found = headrace.compare(evaluation(rows(GOOD)), evaluation(rows(BAD), policy="two"))
    row = success_of(found)
    assert (row.verdict, row.test) == ("regressed", "sign flips, 400 pairs of episodes")
    assert row.effect == pytest.approx(-0.35)
    assert row.sample.centers == pytest.approx((0.95, 0.6))
    assert [side.n for side in row.sample.moments] == [400, 400]
    assert found.regressed


def test_rewards_of_the_same_episodes_are_compared_in_pairs() -> None:
    hard = np.random.default_rng(0).normal(100, 40, 400)
    found = headrace.compare(
        evaluation(rows(GOOD, hard)),
        evaluation(rows(GOOD, hard + 6.0), policy="two"),
        rule=headrace.bench.CompareCfg(metrics=["play.reward"]),
    )
    (row,) = found.comparisons[0].rows
    assert (row.verdict, row.test) == ("improved", "sign flips, 400 pairs of episodes")


def test_saved_evaluations_and_journals_are_read_by_any_name_and_found_in_directories(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    evaluation(rows(GOOD)).save(before / "evaluation.json")
    header = Header(identity=IDENTITY | {"policy": "two"}, circumstances=CIRCUMSTANCES)
    Journal(after / "evaluation.jsonl", header, range(400), resume=False).add(rows(BAD))
    assert success_of(headrace.compare(before, after)).verdict == "regressed"
    moved = (after / "evaluation.jsonl").rename(after / "anything")
    assert success_of(headrace.compare(before / "evaluation.json", moved)).verdict == "regressed"
    assert main(["compare", str(before), str(moved)]) == 1
    assert read_bundle(moved).run.task == "pusher-solid"


def test_parts_of_one_evaluation_are_one_side() -> None:
    parts = [evaluation(rows(GOOD[:200])), evaluation(rows(GOOD[200:], first=200))]
    row = success_of(headrace.compare(parts, evaluation(rows(BAD), policy="two")))
    assert row.test == "sign flips, 400 pairs of episodes"


def test_an_unfinished_evaluation_gets_no_verdict(tmp_path: Path) -> None:
    """Episodes that end early are finished first: what there is leans to them."""
    header = Header(identity=IDENTITY, circumstances=CIRCUMSTANCES)
    Journal(tmp_path / "cut.jsonl", header, range(500), resume=False).add(rows(GOOD))
    with pytest.raises(DataError, match="expected a completed run"):
        headrace.compare(tmp_path / "cut.jsonl", evaluation(rows(BAD), policy="two"))
    found = headrace.compare([tmp_path / "cut.jsonl", evaluation(rows(GOOD))], evaluation(rows(BAD), policy="two"))
    assert any("100 episodes are unfinished" in note for note in found.comparisons[0].notes)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"source": "ant"}, "--allow task"),
        ({"execute": 4}, "'execute': 4"),
        ({"overrides": {}}, "--allow settings"),
        ({"fidelity": "hold"}, "--allow settings"),
    ],
)
def test_evaluations_of_something_else_are_refused(changed: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        headrace.compare(evaluation(rows(GOOD)), evaluation(rows(BAD), policy="two", **changed))


def test_an_evaluation_that_does_not_say_what_it_is_of_is_refused() -> None:
    bare = Evaluation(
        episodes=rows(GOOD), plan=tuple(range(400)), status="completed", counters=Counters(), strict_size=16
    )
    with pytest.raises(DataError, match="policy_id="):
        headrace.compare(bare, bare)


def test_other_episodes_are_compared_as_two_sets() -> None:
    row = success_of(headrace.compare(evaluation(rows(GOOD)), evaluation(rows(BAD, first=1000), policy="two")))
    assert (row.verdict, row.test) == ("regressed", "relabeling, 400 and 400 episodes")
    assert [side.n for side in row.sample.moments] == [400, 400]


def test_a_report_shows_evaluations_and_their_verdicts(tmp_path: Path) -> None:
    written = headrace.bench.report(
        evaluation(rows(GOOD)), evaluation(rows(BAD), policy="two"), output=tmp_path / "page.html", names=("old", "new")
    )
    page = written.path.read_text()
    assert 'class="verdict regressed"' in page
    assert "-35.0 points" in page
    assert "<td>95.0%</td><td>60.0%</td>" in page
    assert "on a chip" in page
