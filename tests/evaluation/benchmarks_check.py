"""MetaWorld and PushT over the bridge, after ``scripts/setup_simulators.sh benchmarks``: ``make test-simulators``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headrace
from headrace.evaluation import PlayCfg
from headrace.evaluation.suites import BENCHMARKS, SuiteTask, benchmark_suite, evaluate_suite

TASKS = {"reach-v3": "metaworld_mt50", "drawer-open-v3": "metaworld_mt50", "pusht": "pusht"}


def one(name: str, trials: int = 3, pixels: int = 64) -> SuiteTask:
    """Return a row of a suite, with small pictures."""
    return next(row for row in benchmark_suite(TASKS[name], trials, pixels) if row.name == name)


def wander(obs: headrace.types.Obs, context: object) -> torch.Tensor:
    """Plan 25 actions from the picture's mean and the state."""
    state, shade = obs["observation.state"], obs["observation.image"].float().mean(dim=(1, 2, 3))
    steps = torch.arange(25)[None, :, None]
    wave = torch.sin(0.1 * steps + 40 * state[:, None] + shade[:, None, None])
    return 256 + 200 * wave if state.shape[1] == 2 else wave


@pytest.mark.parametrize("name", list(TASKS))
def test_an_episode_is_a_function_of_its_id_and_pictures_are_those_of_its_state(name: str) -> None:
    env = one(name).task.make(num_envs=2)
    size = env.action_space.shape[1:]
    seen = []
    for ids in ([3, 4], [7, 8], [4, 3]):
        obs, _ = env.reset(options={"episode_ids": torch.tensor(ids)})
        rows = [obs]
        for step in range(3):
            rows.append(env.step(torch.full((2, *size), 100.0 + step if name == "pusht" else 0.5)).obs)
        seen.append([{key: value.clone() for key, value in row.items()} for row in rows])
    for first, other, again in zip(*seen, strict=True):
        for key, value in first.items():
            assert torch.equal(value, again[key].flip(0)), key
        assert not torch.equal(first["observation.environment_state"], other["observation.environment_state"])
        assert first["observation.image"].shape == (2, 64, 64, 3)
        assert first["observation.image"].float().std() > 10
    assert env.instructions()[0]
    env.close()


@pytest.mark.parametrize("name", ["drawer-open-v3", "pusht"])
def test_a_suite_is_equal_for_any_batch_and_draws_only_what_is_read(name: str) -> None:
    play, tables = PlayCfg(horizon=25, policy_id="wander"), []
    for num_envs in (1, 3):
        found = evaluate_suite((one(name),), wander, num_envs=num_envs, play=play, progress=False).total
        tables.append(found.episodes)
        assert found.counters.frames_drawn == found.counters.rows_inferred
    assert tables[0] == tables[1]
    assert len({row.reward for row in tables[0]}) == 3


def test_the_suites_have_metaworlds_fifty_tasks() -> None:
    assert len(set(BENCHMARKS["metaworld_mt50"])) == 50
    row = one("reach-v3")
    with pytest.raises(headrace.errors.HeadraceError, match="no-such-v3"):
        replace(row.task, overrides={"name": "no-such-v3", "pixels": 0}).make()
