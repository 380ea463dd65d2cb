"""``headrace.evaluate``: what the command does, in a line of Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headrace
from flat import evaluate
from headrace.errors import ConfigError, HeadraceError, PolicyError
from headrace.evaluation import Evaluation
from headrace.evaluation.scheduling import Greedy
from headrace.learning import PPOCfg
from headrace.policies import Batching, ObservationMap
from headrace.policies.act import ActCfg, ActPolicy, save_policy
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs

HERE = __name__


class Shove(nn.Module):
    """Pushes the cart a little, at random."""

    horizon = 8

    def forward(self, obs: Obs, context: ChunkContext) -> Tensor:
        return context.noise(8, 1) * 0.2


class Patient(Greedy):
    """A rule of one's own."""


def breaks(obs: Obs, context: ChunkContext) -> Tensor:
    if bool((context.chunk_index > 2).any()):
        raise ValueError("no idea")
    return torch.zeros(len(context.env_ids), 8, 1)


SHORT = {"episode_length": 40}


def _quick(policy: object = None, **more: object) -> Evaluation:
    settings = {"episodes": 5, "num_envs": 2, "threads": 1, "overrides": SHORT, "progress": False, **more}
    return evaluate("cartpole", policy, **settings)  # type: ignore[arg-type]


def _by_hand(seed: int = 0, **more: object) -> Evaluation:
    """The same with every setting written out: a made environment, the loop over it."""
    env = headrace.make("cartpole", 3, threads=1, overrides=SHORT, autoreset="disabled", final_obs=False)
    settings = {"episodes": 5, "execute": 8, "seed": seed, "progress": False, **more}
    try:
        return evaluate(env, Shove(), **settings)  # type: ignore[arg-type]
    finally:
        env.close()


def test_a_name_a_recipe_and_a_made_environment_give_the_rows_of_the_loop_written_out() -> None:
    expected = _by_hand(seed=7).episodes
    recipe = headrace.EnvRecipe("cartpole", num_envs=2, seed=7, threads=1, overrides=SHORT)
    env = recipe.make(autoreset="disabled", final_obs=False)
    assert _quick(Shove(), seed=7).episodes == expected
    assert evaluate(recipe, Shove(), episodes=5, progress=False).episodes == expected
    assert evaluate(env, Shove(), episodes=5, progress=False).episodes == expected
    assert evaluate(env, Shove(), episodes=5, seed=0, progress=False).episodes == _by_hand().episodes
    env.reset()  # stays open
    env.close()


def test_policies_are_found_by_name_and_file(tmp_path: Path) -> None:
    assert _quick(f"{HERE}:Shove").episodes == _by_hand().episodes
    file = tmp_path / "policy.pt"
    save_policy(ActPolicy(ActCfg(obs_dim=4, action_dim=1)), file, task="cartpole")
    assert _quick(file).episodes == _quick(str(file)).episodes
    shipped = evaluate("pusher-solid", episodes=[4], num_envs=1, threads=1, progress=False)
    assert [row.episode_id for row in shipped.episodes] == [4]
    assert len(_quick(None).episodes) == 5, "the published training of the task"
    with pytest.raises(ConfigError, match="we ship none for 'humanoid'"):
        evaluate("humanoid")


def test_what_is_executed_of_a_chunk_is_what_offset_and_latency_leave() -> None:
    assert _quick(Shove(), offset=1, latency=2).episodes == _by_hand(execute=5, offset=1, latency=2).episodes
    blended = _quick(Shove(), ensemble_decay=0.01)
    assert blended.counters.rows_inferred == blended.counters.env_steps


def test_a_module_gets_its_modes_back() -> None:
    policy = Shove()
    policy.add_module("still", nn.Dropout())
    policy.still.eval()
    _quick(policy)
    assert (policy.training, policy.still.training) == (True, False)


def test_rules_and_batches_are_passed_on(tmp_path: Path) -> None:
    assert _quick(Shove(), batching=Batching(size=4)).strict_size == 4
    assert _quick(Shove(), batching="fast").strict_size is None
    assert _quick(Shove(), admission=f"{HERE}:Patient").episodes == _by_hand().episodes


def test_a_journal_is_resumed_and_a_film_is_made(tmp_path: Path) -> None:
    pytest.importorskip("av")
    journal, film = tmp_path / "table.jsonl", tmp_path / "film.mp4"
    _quick(Shove(), episodes=[0, 1], journal=journal)
    again = _quick(Shove(), journal=journal, resume=True, video=film)
    assert again.episodes == _by_hand().episodes
    assert again.counters.env_steps == sum(row.length for row in again.episodes[2:])
    assert film.stat().st_size > 0
    with pytest.raises(ConfigError, match="already exists, and nothing is ever overwritten"):
        _quick(Shove(), video=film)


def test_a_made_environment_is_filmed_for_one_evaluation_only(tmp_path: Path) -> None:
    pytest.importorskip("av")
    env = headrace.make("cartpole", 2, threads=1, overrides=SHORT, autoreset="disabled", final_obs=False)
    evaluate(env, Shove(), episodes=2, video=tmp_path / "film.mp4", progress=False)
    size = (tmp_path / "film.mp4").stat().st_size
    evaluate(env, Shove(), episodes=2, progress=False)  # would raise in an observer that is closed
    assert (tmp_path / "film.mp4").stat().st_size == size
    env.close()


def test_gymnasium_environments_are_bridged() -> None:
    settings = {"horizon": 4, "episodes": 3, "num_envs": 2, "progress": False}
    result = evaluate("gym:Pendulum-v1", _still, overrides={"max_episode_steps": 12}, **settings)  # type: ignore[arg-type]
    assert [row.length for row in result.episodes] == [12, 12, 12]
    threaded = evaluate("gym:Pendulum-v1", _still, overrides={"max_episode_steps": 12}, threads=2, **settings)  # type: ignore[arg-type]  # as above
    assert threaded.episodes == result.episodes, "threads step it, and change nothing"
    recipe = headrace.EnvRecipe("gym:Pendulum-v1")
    with pytest.raises(ConfigError, match="threads: expected none with a bridged environment"):
        evaluate(recipe, _still, threads=1, horizon=4)
    with pytest.raises(ConfigError, match=r"video .*expected a task of ours"):
        evaluate("gym:Pendulum-v1", _still, video="film.mp4", **settings)  # type: ignore[arg-type]
    assert not Path("film.mp4").exists()


class _OfTheContract:
    """An environment that somebody else wrote: no more than what is played with."""

    _USED = (
        "num_envs device timer autoreset fidelity single_action_space reset step observe instructions suspend resume"
    )

    def __init__(self, env: headrace.BatchEnv) -> None:
        for name in self._USED.split():
            setattr(self, name, getattr(env, name))


def test_an_environment_needs_no_more_than_the_contract(tmp_path: Path) -> None:
    env = headrace.make("cartpole", 2, threads=1, overrides=SHORT, autoreset="disabled")
    lean = _OfTheContract(env)
    settings = {"episodes": 5, "progress": False}
    told = {"instruction": "stand", "journal": tmp_path / "rows.jsonl", "policy_id": "shove"}
    rows = evaluate(lean, f"{__name__}:Shove", **settings).episodes  # type: ignore[arg-type]
    assert rows == evaluate(env, Shove(), **settings).episodes  # type: ignore[arg-type]
    result = evaluate(lean, Shove(), **settings, **told)  # type: ignore[arg-type]
    assert (result.seeded, result.counters.frames_drawn) == (True, 0)
    assert {row.instruction for row in result.episodes} == {"stand"}
    env.close()


def test_negative_seeds_are_seeds() -> None:
    below, usual = _quick(Shove(), seed=-1), _quick(Shove())
    assert {row.seed for row in below.episodes} == {-1}
    assert [row.reward for row in below.episodes] != [row.reward for row in usual.episodes]
    with pytest.raises(ConfigError, match="a number of 64 bits"):
        _quick(Shove(), seed=-(2**63) - 1)


def _still(obs: Obs) -> Tensor:
    return torch.zeros(len(next(iter(obs.values()))), 4, 1)


def test_what_was_finished_is_in_the_error() -> None:
    with pytest.raises(PolicyError, match="no idea") as caught:
        _quick(breaks, horizon=8, episodes=40, num_envs=3, overrides=SHORT | {"max_angle": 0.2})
    assert isinstance(caught.value.finished, Evaluation)
    assert caught.value.finished.status == "failed"


def test_the_result_is_saved_also_when_the_policy_fails(tmp_path: Path) -> None:
    found = _quick(Shove(), output=tmp_path / "whole.json")
    assert Evaluation.load(tmp_path / "whole.json") == found
    assert found.identity is not None
    assert found.identity["source"] == "cartpole"
    with pytest.raises(PolicyError) as caught:
        _quick(breaks, horizon=8, episodes=40, num_envs=3, overrides=SHORT | {"max_angle": 0.2}, policy_id="breaks",
               output=tmp_path / "part.json")  # fmt: skip
    part = Evaluation.load(tmp_path / "part.json")
    assert part == caught.value.finished
    assert (part.status, part.planned, part.mean_reward) == ("failed", 40, None)


def test_settings_that_contradict_what_is_there_are_refused() -> None:
    recipe = headrace.EnvRecipe("cartpole", num_envs=2)
    with pytest.raises(ConfigError, match=r"num_envs: expected that of the recipe, 2, got 3; use recipe.replace"):
        evaluate(recipe, Shove(), num_envs=3)
    env = headrace.make("cartpole", 2, threads=1)
    with pytest.raises(ConfigError, match="num_envs cannot be changed on an existing environment, got 1"):
        evaluate(env, Shove(), num_envs=1)
    with pytest.raises(ConfigError, match='expected an environment with autoreset="disabled"'):
        evaluate(env, Shove(), progress=False)
    env.close()
    for setting in ({"engine": "thread"}, {"batching": "fast"}):
        with pytest.raises(ConfigError, match="engine, batching: expected none with openpi://nowhere:1"):
            _quick("openpi://nowhere:1", **setting)
    with pytest.raises(ConfigError, match="mapping: expected at least one key that the policy reads"):
        _quick(Shove(), mapping=ObservationMap())


def test_a_name_with_a_namespace_and_play_after_it_finds_the_policy_that_we_ship() -> None:
    found = evaluate("headrace/pusher-solid-Play", episodes=1, num_envs=1, policy_id="ours", progress=False)
    assert found.identity is not None
    assert found.identity["source"] == "pusher-solid"


def test_what_was_trained_is_evaluated_with_the_settings_of_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = PPOCfg(steps=8, epochs=1, minibatches=2)
    made = headrace.train("cartpole", iterations=1, num_envs=4, threads=1, ppo=small, overrides=SHORT)
    threads = torch.get_num_threads()
    plan = {"episodes": 5, "num_envs": 2, "threads": 1, "progress": False}
    found = evaluate("cartpole", made.directory, journal=tmp_path / "a.jsonl", **plan)
    assert len(found.episodes) == 5
    assert max(row.length for row in found.episodes) <= SHORT["episode_length"]
    assert torch.get_num_threads() == threads
    last = made.directory / "checkpoints" / "last.pt"
    for policy in (last, str(last), "latest"):
        again = evaluate("cartpole", policy, **{**plan, "num_envs": 3})
        assert again.episodes == found.episodes
    played = headrace.play(
        "cartpole", policy=made.directory, episodes=5, num_envs=2, threads=1, run=headrace.RunCfg(output="played")
    )
    assert played.bundle.reward is not None
    rewards = [row.reward for row in found.episodes]
    assert played.bundle.reward.mean == pytest.approx(sum(rewards) / 5, rel=1e-4)
    resumed = evaluate("cartpole", last, journal=tmp_path / "a.jsonl", resume=True, **plan)
    assert resumed.episodes == found.episodes
    shown = headrace.bench.run("cartpole", policy="latest", num_envs=2, num_steps=50, threads=1)
    assert shown.episodes >= 2
    with pytest.raises(ConfigError, match="of task 'ant', got one of 'cartpole'"):
        evaluate("ant", last, **plan)


@pytest.mark.parametrize("missing", ["nothing.pt", "runs/nothing", "pusher-sold"])
def test_a_policy_that_is_not_there_is_refused_before_anything_is_made(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headrace.EnvRecipe, "make", _never)
    with pytest.raises(HeadraceError, match=missing):
        evaluate("cartpole", missing)
    with pytest.raises(HeadraceError, match=missing):
        headrace.bench.run("cartpole", policy=missing)


def _never(*_: object, **__: object) -> None:
    raise AssertionError("an environment was made")


def test_a_chunk_policy_is_not_run_but_the_error_says_how_to_see_it(tmp_path: Path) -> None:
    file = tmp_path / "policy.pt"
    save_policy(ActPolicy(ActCfg(obs_dim=4, action_dim=1, horizon=8)), file, task="cartpole")
    with pytest.raises(ConfigError, match=r"plans chunks; 'headrace evaluate cartpole --policy .* --video"):
        headrace.bench.run("cartpole", policy=str(file))


def test_a_policy_that_cannot_be_imported_is_refused_before_environments_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an environment was made")

    monkeypatch.setattr("headrace.EnvRecipe.make", refuse)
    with pytest.raises(ConfigError, match="cannot be imported"):
        evaluate("cartpole", "no_such_module:Policy", episodes=2)
