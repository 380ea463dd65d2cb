"""``headrace.bench.run``, ``view`` and ``serve`` from Python: one call each."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
import torch

import headrace
from headrace.errors import ConfigError
from headrace.policies import ServeCfg
from headrace.recording import EpisodeDataset


def test_a_run_says_what_was_stepped_and_how_its_episodes_ended(tmp_path: Path) -> None:
    done: list[int] = []
    recipe = headrace.EnvRecipe("cartpole", num_envs=4, seed=3, threads=1, overrides={"episode_length": 5})
    result = headrace.bench.run(
        recipe, policy="zero", num_steps=12, suspend_fraction=0.5, record=tmp_path / "d", on_progress=done.append
    )
    assert done == list(range(1, 13))
    assert (result.task, result.num_envs, result.suspended, result.num_steps) == ("cartpole", 4, 2, 12)
    assert (result.episodes, result.mean_length, result.recorded, result.abandoned) == (4, 5.0, 4, 2), (
        "suspended ones never began"
    )
    assert result.mean_return is not None
    assert result.steps_per_second == 2 * 12 / result.seconds
    dataset = EpisodeDataset(tmp_path / "d")
    assert len(dataset) == 4
    assert dataset.info.recipe == recipe.identity()


def test_a_run_compiles_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def first_step(env: headrace.BatchEnv) -> None:
        env.reset()
        env.step(torch.zeros(2, 1))
        steps.append(env.timer.calls()["physics"])

    monkeypatch.setattr("headrace.bench.measured.run.first_step", first_step)
    found = headrace.bench.run("cartpole", num_envs=2, num_steps=1, threads=1)
    assert steps == [1]
    assert sum(found.stages.values()) <= found.seconds, "what was measured is what came after"


def test_a_function_acts_and_sees_the_observation_groups() -> None:
    seen: list[tuple[int, ...]] = []

    def act(obs: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(tuple(obs["policy"].shape))
        return torch.zeros(3, 1)

    headrace.bench.run("cartpole", policy=act, num_steps=2, num_envs=3, threads=1)
    assert seen == [(3, 4), (3, 4)]


def test_what_a_bridged_environment_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="which draws itself"):
        headrace.viewing.view("gym:CartPole-v1", renderer="gl")
    with pytest.raises(ConfigError, match="expected an environment that draws itself"):
        headrace.viewing.view("gym:CartPole-v1", overrides={"render_mode": None}, port=0)


def test_a_view_is_served_while_it_steps() -> None:
    pages: list[str] = []

    def look(url: str) -> None:
        with urllib.request.urlopen(url, timeout=30) as answer:
            pages.append(answer.read().decode())

    headrace.viewing.view("cartpole", num_steps=2, num_envs=2, port=0, policy="zero", on_url=look)
    assert "<title>cartpole" in pages[0]


class Count:
    """Plans what it is told."""

    horizon, action_dim = 2, 1

    def __call__(self, obs, context=None):
        return obs["policy"][:, None, :1].expand(-1, 2, 1) + 1


def test_a_policy_object_is_served_and_answers_a_client() -> None:
    with headrace.policies.serve(policy=Count(), cfg=ServeCfg(port=0)) as server:
        address = server.address.replace("ws:", "openpi:")
        found = headrace.evaluate("cartpole", address, episodes=2, num_envs=2, progress=False)
    assert len(found.episodes) == 2
    local = headrace.evaluate("cartpole", Count(), episodes=2, num_envs=2, progress=False)
    assert [row.reward for row in found.episodes] == [row.reward for row in local.episodes]
