"""Recipes: an environment as a value."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headrace
from headrace import EnvRecipe, errors
from headrace.evaluation import Evaluation

RECIPE = EnvRecipe("cartpole", num_envs=3, seed=5, threads=1, overrides={"episode_length": 4}, autoreset="disabled")


@pytest.mark.parametrize("recipe", [RECIPE, EnvRecipe("gym:CartPole-v1", num_envs=2, executor="threads", workers=2)])
def test_a_recipe_survives_pickle_and_json(recipe) -> None:
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert EnvRecipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


@pytest.mark.parametrize(
    "recipe", [RECIPE, EnvRecipe("gym:CartPole-v1", num_envs=2, overrides={"sutton_barto_reward": True})]
)
def test_an_environment_knows_its_recipe_and_is_made_again_from_it(recipe) -> None:
    env = recipe.make()
    assert env.recipe == recipe
    assert env.num_envs == recipe.num_envs
    again = env.recipe.make(num_envs=1)
    assert again.recipe == recipe.replace(num_envs=1)
    first, _ = env.reset()
    alone, _ = again.reset()
    assert torch.equal(first["policy"][:1], alone["policy"])
    env.close()
    again.close()


def test_a_tuple_among_the_overrides_survives_json() -> None:
    path = "events.start.function.positions"
    recipe = EnvRecipe("cartpole-terms", threads=1, overrides={path: (0.1, 0.2)})
    read = EnvRecipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert read == recipe
    assert read != recipe.replace(overrides={path: (0.1, 0.3)})
    env, again = recipe.make(), read.make()
    assert torch.equal(env.reset()[0]["policy"], again.reset()[0]["policy"])
    env.close()
    again.close()


def test_the_identity_of_a_recipe_is_what_decides_an_episode_and_nothing_else() -> None:
    assert RECIPE.identity() == {"source": "cartpole", "overrides": {"episode_length": 4}}
    elsewhere = RECIPE.replace(num_envs=7, seed=1, threads=2, autoreset="same_step", final_obs=False, episode_stride=9)
    assert elsewhere.identity() == RECIPE.identity()
    assert EnvRecipe("ant", sim="warp").identity() == {"source": "ant", "sim": "warp"}
    assert EnvRecipe.from_json(RECIPE.identity()) == EnvRecipe("cartpole", overrides={"episode_length": 4})


def test_an_environment_of_a_task_object_has_no_recipe() -> None:
    env = headrace.make(headrace.envs.registry.make_task("cartpole"))
    assert env.recipe is None
    env.close()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RECIPE.replace(num_env=2), errors.UnknownNameError, "did you mean 'num_envs'"),
        (lambda: RECIPE.replace(num_envs=0), errors.ConfigError, "num_envs: expected at least 1"),
        (lambda: EnvRecipe.from_json({"num_envs": 2}), errors.DataError, "an object with source"),
        (lambda: EnvRecipe.from_json({"source": "ant", "n": 2}), errors.DataError, "unknown field .n.; choose"),
        (lambda: EnvRecipe("ant", overrides={"x": object()}).to_json(), errors.ConfigError, "JSON"),
        (lambda: EnvRecipe("gym:X-v0", device="cuda"), errors.ConfigError, "device: .* a bridged .* got 'cuda'"),
        (lambda: EnvRecipe("gym:X-v0", threads=3), errors.ConfigError, "threads: .*; executor= and workers= say"),
        (lambda: EnvRecipe("gym:X-v0", sim="warp"), errors.ConfigError, "sim: .* got 'warp'"),
        (lambda: EnvRecipe("gym:X-v0", sim="warp"), errors.ConfigError, "it brings its own physics"),
        (lambda: EnvRecipe("ant", sim="wrap"), errors.UnknownNameError, "did you mean 'warp'"),
        (lambda: EnvRecipe("ant", overrides=5), errors.ConfigError, "overrides: expected a Mapping, got 5"),
        (lambda: EnvRecipe.from_json({"source": "ant", "num_envs": 0}), errors.DataError, "recipe: num_envs: expected"),
        (lambda: EnvRecipe("ant", executor="threads"), errors.ConfigError, "executor: .* a task, got 'threads'"),
        (lambda: EnvRecipe("ant", sim=3), errors.UnknownNameError, "unknown sim 3; choose from"),
        (lambda: EnvRecipe("ant", autoreset=3), errors.UnknownNameError, "unknown autoreset mode 3; choose from"),
        (lambda: EnvRecipe("gym:X-v0", executor="turbo"), errors.UnknownNameError, "unknown executor 'turbo'; choose"),
        (
            lambda: EnvRecipe("tcp://host:7000", executor="threads"),
            errors.ConfigError,
            "executor: expected none with 'tcp:",
        ),
        (lambda: EnvRecipe("ant", device=7), errors.ConfigError, "device: expected a str, got 7"),
        (lambda: EnvRecipe("ant", final_obs="maybe"), errors.ConfigError, "final_obs: expected a bool, got 'maybe'"),
        (lambda: RECIPE.replace(workers=2), errors.ConfigError, "workers: .* a task, got 2; threads= says"),
    ],
)
def test_what_cannot_be_a_recipe_is_refused(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()


def ids_of(env, steps: int) -> list[list[int]]:
    seen = [env.episode_ids.tolist()]
    for _ in range(steps):
        env.step(torch.zeros(env.num_envs, *env.single_action_space.shape, dtype=env_dtype(env)))
        seen.append(env.episode_ids.tolist())
    return [ids for i, ids in enumerate(seen) if i == 0 or ids != seen[i - 1]]


def env_dtype(env) -> torch.dtype:
    return torch.int64 if env.single_action_space.shape == () else torch.float32


@pytest.mark.parametrize("source", ["cartpole", "bridge"])
def test_ids_go_on_from_explicit_ones_in_steps_of_the_stride(source) -> None:
    def make(**kwargs):
        if source == "bridge":
            return headrace.bridge("CartPole-v1", 2, env_kwargs={"max_episode_steps": 2}, **kwargs)
        return headrace.make("cartpole", 2, overrides={"episode_length": 2}, **kwargs)

    env = make()
    env.reset()
    assert ids_of(env, 5) == [[0, 1], [2, 3], [4, 5]]
    env.reset(options={"episode_ids": [100, 7]})
    assert ids_of(env, 5) == [[100, 7], [102, 9], [104, 11]]
    env.reset(options={"reset_mask": torch.tensor([False, True])})
    assert env.episode_ids.tolist() == [104, 13]
    env.reset(seed=3)
    assert ids_of(env, 3) == [[0, 1], [2, 3]]
    env.close()
    env = make(episode_stride=10)
    env.reset(options={"episode_ids": [4, 5]})
    assert ids_of(env, 5) == [[4, 5], [14, 15], [24, 25]]
    saved = env.state_dict()
    env.step(torch.zeros(2, *env.single_action_space.shape, dtype=env_dtype(env)))
    env.load_state_dict(saved)
    env.reset(options={"reset_mask": torch.tensor([True, False])})
    assert env.episode_ids.tolist() == [34, 25]
    env.close()


def test_a_seed_of_numpy_is_a_number_and_arrays_are_refused(tmp_path: Path) -> None:
    drawn: Any = np.int64(7)
    recipe = EnvRecipe("cartpole", seed=drawn)
    recipe.save(tmp_path / "recipe.json")
    assert EnvRecipe.load(tmp_path / "recipe.json") == EnvRecipe("cartpole", seed=7)
    for env in ("cartpole", recipe.make(autoreset="disabled")):
        found = headrace.evaluate(env, lambda obs: 0 * obs["policy"][:, :1], episodes=1, seed=drawn, progress=False)
        found.save(tmp_path / f"{type(env).__name__}.json")
        assert Evaluation.load(tmp_path / f"{type(env).__name__}.json").episodes == found.episodes
    for seed in (np.array([1, 2]), torch.tensor(3), "3", True):
        with pytest.raises(errors.ConfigError, match="expected a number of 64 bits"):
            EnvRecipe("cartpole", seed=seed)
