"""Two policies over the same episodes: their differences are those of two evaluations, and what flipped is filmed."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

import headrace
from headrace.cli import main
from headrace.errors import ConfigError
from headrace.evaluation.paired import evaluate_paired
from headrace.statistics import bootstrap_interval, paired_interval
from headrace.types import Obs

TASK, SETTINGS = "pusher-solid", {"episode_length": 60}


def still(obs: Obs) -> Tensor:
    return 0 * obs["policy"][:, :7]


def test_pairs_are_the_rows_of_two_evaluations_and_the_intervals_are_paired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = {"num_envs": 2, "seed": 3, "overrides": SETTINGS, "progress": False}
    found = evaluate_paired(TASK, None, still, episodes=10, **how)  # type: ignore[arg-type]  # by name
    alone = [headrace.evaluate(TASK, policy, episodes=10, **how) for policy in (None, still)]  # type: ignore[arg-type]
    assert [found.policy.episodes, found.against.episodes] == [arm.episodes for arm in alone]
    assert found.policy.counters.env_steps == sum(row.length for row in alone[0].episodes)
    gains = [row.reward - other.reward for row, other in zip(alone[0].episodes, alone[1].episodes, strict=True)]
    assert found.reward_difference == bootstrap_interval(np.array(gains))
    won = [row.success and not other.success for row, other in found.pairs]
    both = [row.success and other.success for row, other in found.pairs]
    assert sum(won) > 3
    assert found.success_difference == paired_interval(sum(both), 0, sum(won), 10 - sum(won) - sum(both))
    assert [row.episode_id for row, _ in found.flipped] == np.flatnonzero(won).tolist()
    found.to_csv(tmp_path / "pairs.csv")
    rows = list(csv.DictReader((tmp_path / "pairs.csv").read_text().splitlines()))
    assert [float(row["difference"]) for row in rows] == gains

    films = tmp_path / "films"
    words = ["evaluate", TASK, "--against-instruction", "none", "--episodes", "3", "--num-envs", "2"]
    assert main([*words, "--set", "episode_length=30", "--film", "flips", "--films", str(films)]) == 0
    out = capsys.readouterr().out
    assert "3 of 3 pairs of episodes" in out
    assert "3 equal" in out, "one policy plays the same with a text that it does not read"
    assert not list(films.rglob("*.mp4"))


@pytest.mark.slow
def test_episodes_that_flipped_are_filmed_in_both_arms(tmp_path: Path) -> None:
    found = evaluate_paired(
        TASK, None, still, episodes=1, num_envs=1, overrides=SETTINGS, films=tmp_path / "films", progress=False
    )
    assert len(found.flipped) == 1
    for arm in ("policy", "against"):
        assert (tmp_path / "films" / arm / "episode-000000.mp4").stat().st_size > 1000


def test_what_cannot_be_paired_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--film", "flips"], "--film flips: expected another policy"),
        (["--against", TASK, "--journal", "x"], "--journal: expected none with --against"),
        (["--against", TASK, "--film", "failures"], "--film: expected flips with --against"),
    ):
        assert main(["evaluate", TASK, *words]) != 0
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="engine, batching: expected none"):
        evaluate_paired(TASK, None, "openpi://127.0.0.1:9", play=headrace.evaluation.PlayCfg(engine="thread"))
