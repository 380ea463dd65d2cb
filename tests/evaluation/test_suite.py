"""Suites: several tasks with seeds and instructions as one plan; films of what failed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import headrace
from flat import evaluate, evaluate_suite
from headrace.cli import main
from headrace.errors import ConfigError, DataError, HeadraceError
from headrace.evaluation import Evaluation
from headrace.evaluation.suites import SuiteResult
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs

HERE = __name__
SUITE = """
episodes = 3

[[task]]
task = "cartpole"
overrides = { episode_length = 20 }
seeds = [0, 4]

[[task]]
task = "cartpole"
name = "left"
overrides = { episode_length = 20, max_angle = 0.5 }
instruction = "lean to the left"
episodes = 2
"""


class Listener:
    """Pushes as it is told, with noise of its own."""

    horizon, action_dim, obs_steps = 8, 1, 1

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        side = torch.tensor([-0.5 if "left" in text else 0.1 for text in context.instructions])
        return side[:, None, None] + 0.1 * context.noise(8, 1)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.toml"
    path.write_text(SUITE)
    return path


def _alone(seed: int, episodes: int, overrides: dict[str, object], **more: object) -> Evaluation:
    settings = {"num_envs": 1, "threads": 1, "progress": False, **more}
    return evaluate("cartpole", Listener(), episodes=episodes, seed=seed, overrides=overrides, **settings)  # type: ignore[arg-type]


def test_a_suite_has_the_tables_of_its_tasks_and_pools_seeds_and_tasks(suite: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    settings = {"num_envs": 2, "threads": 1, "progress": False}
    found = evaluate_suite(suite, Listener(), output=output, **settings)
    short, told = {"episode_length": 20}, {"episode_length": 20, "max_angle": 0.5}
    expected = {
        ("cartpole", 0): _alone(0, 3, short),
        ("cartpole", 4): _alone(4, 3, short),
        ("left", 0): _alone(0, 2, told, instruction="lean to the left"),
    }
    assert {key: part.episodes for key, part in found.parts.items()} == {k: p.episodes for k, p in expected.items()}
    assert {row.instruction for row in found.parts["left", 0].episodes} == {"lean to the left"}
    assert _alone(0, 2, told).episodes != expected["left", 0].episodes  # the policy listens
    pooled = found.of_task("cartpole")
    assert [row.reward for row in pooled.episodes] == [
        row.reward for seed in (0, 4) for row in expected["cartpole", seed].episodes
    ]
    assert pooled.mean_reward is not None
    assert (found.total.planned, found.unfinished) == (8, 0)
    assert Evaluation.load(output / "left-0" / "evaluation.json").episodes == expected["left", 0].episodes
    assert headrace.bench.report(output, output=tmp_path / "report.html").runs == 3


def test_a_suite_is_resumed_and_an_unfinished_one_has_no_rates(suite: Path, tmp_path: Path) -> None:
    settings = {"num_envs": 2, "threads": 1, "progress": False, "journal": tmp_path / "journals"}
    whole = evaluate_suite(suite, Listener(), **settings)
    file = tmp_path / "journals" / "cartpole-4.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]))
    again = evaluate_suite(suite, Listener(), resume=True, **settings)
    assert {key: part.episodes for key, part in again.parts.items()} == {k: p.episodes for k, p in whole.parts.items()}
    part = SuiteResult(tasks=whole.tasks, parts={("cartpole", 0): whole.parts["cartpole", 0]})
    assert part.unfinished == 5
    assert part.total.mean_reward is part.of_task("cartpole").mean_reward is part.of_task("left").mean_reward is None


def test_the_command_prints_a_row_per_task_and_a_total(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", str(suite), "--policy", f"{HERE}:Listener", "--num-envs", "2", "--threads", "1"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert [word for word in ("cartpole", "left", "total", "8") if word not in shown] == []
    assert main([*command, "--seed", "3"]) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[[task]]\ntask = 3", "expected task = "),
        ("[[task]]\ntask = 'a'\nseed = 3", "'seed'"),
        ("episode = 3\n[[task]]\ntask = 'a'", "'episode'"),
        ("[[task]]\ntask = 'a'\nseeds = [1, 1]", "every seed once"),
        ("[[task]]\ntask = 'a'\nseeds = 1", "expected seeds"),
        ("[[task]]\ntask = 'a'\nepisodes = 0", "episodes: expected at least 1"),
        ("[[task]]\ntask = 'a'\nname = '../a'", "expected a name"),
        ("[[task]]\ntask = 'a'\ninstruction = 1", "instruction as a text"),
        ("[[task]]\ntask = 'a'\n[[task]]\ntask = 'a'", "'a' is there twice"),
        ("task = 1", "expected .*task.* tables"),
        ("no toml", "expected a suite"),
    ],
)
def test_a_bad_suite_is_refused_by_name(change: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(change)
    with pytest.raises(HeadraceError, match=message) as caught:
        evaluate_suite(tmp_path / "bad.toml")
    assert "bad.toml" in str(caught.value)


def test_failures_are_played_again_bit_for_bit_and_filmed(tmp_path: Path) -> None:
    pytest.importorskip("av")
    settings = {"film": "failures", "films": tmp_path / "films"}
    overrides = {"episode_length": 30, "max_angle": 0.1}
    found = _alone(0, 6, overrides, num_envs=3, **settings)
    failed = [row.episode_id for row in found.episodes if not row.success]
    assert failed
    films = sorted(path.name for path in (tmp_path / "films").iterdir())
    assert films == [f"episode-{episode:06d}.mp4" for episode in failed]
    _alone(0, 6, overrides, num_envs=3, film=[5], films=tmp_path / "chosen")
    assert [path.name for path in (tmp_path / "chosen").iterdir()] == ["episode-000005.mp4"]
    with pytest.raises(ConfigError, match="already exists"):
        _alone(0, 6, overrides, film=[5], films=tmp_path / "chosen")
    with pytest.raises(ConfigError, match="expected episodes of the plan, got 6"):
        _alone(0, 6, overrides, film=[6], films=tmp_path / "other")


class Moody:
    """Not a function of the episode: the second time it acts otherwise."""

    horizon, action_dim, obs_steps = 8, 1, 1

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], int] = {}

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        plan = torch.zeros(len(context), 8, 1)
        for row, key in enumerate(zip(context.episode_ids.tolist(), context.chunk_index.tolist(), strict=True)):
            plan[row] = 0.01 * self.seen.get(key, 0)
            self.seen[key] = self.seen.get(key, 0) + 1
        return plan


def test_a_film_of_something_else_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("av")
    with pytest.raises(DataError, match="episode 1 was played twice with different results"):
        evaluate(
            "cartpole",
            Moody(),
            episodes=2,
            num_envs=1,
            threads=1,
            film=[1],
            films=tmp_path,
            batching="fast",  # a strict evaluation finds out before the film
            progress=False,
        )


def test_the_command_refuses_episodes_with_a_suite_and_names_trials(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(suite), "--policy", f"{HERE}:Listener", "--episodes", "2"]) == 2
    assert "--episodes: expected none with a suite; a file has its own, --trials N is for" in capsys.readouterr().err
