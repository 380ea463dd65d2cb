"""``headrace.train``: what the command does, in a line of Python."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import headrace
from headrace.bench import SuccessRule, read_bundle
from headrace.bench.schema import TrainingBundle
from headrace.errors import ConfigError, DeviceError, LifecycleError
from headrace.learning import PPOCfg
from libraries.group_envs import Reach

QUICK = PPOCfg(steps=8, epochs=1, minibatches=2, hidden=(8,))


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_line_of_python_leaves_the_files_of_the_command_and_returns_them() -> None:
    seen: list[int] = []
    begun: list[Path] = []
    result = headrace.train(
        "cartpole",
        num_envs=4,
        threads=1,
        iterations=2,
        ppo=QUICK,
        overrides={"episode_length": 6},
        run=headrace.RunCfg(label="mine"),
        on_begin=begun.append,
        on_iteration=lambda done: seen.append(done.number),
    )
    assert begun == [result.directory]
    assert result.directory.parent == Path("runs")
    assert seen == [1, 2]
    assert result.paths == (result.directory / "training.json",)
    stored = read_bundle(result.paths[0])
    assert isinstance(stored, TrainingBundle)
    assert stored.learning == result.bundle.learning
    assert (stored.run.label, stored.run.num_envs, stored.run.framework) == ("mine", 4, "headrace")
    assert result.last.is_file()
    assert result.best.is_file()
    assert stored.checkpoint_path == str(result.last)


def test_a_forked_child_neither_saves_nor_ends_its_parents_training() -> None:
    reading, writing = os.pipe()
    parent, children = os.getpid(), list[int]()

    def fork(_: object) -> None:
        if not children and os.getpid() == parent:
            children.append(os.fork())

    settings = {"num_envs": 2, "threads": 1, "iterations": 2, "ppo": QUICK, "on_iteration": fork}
    try:
        result = headrace.train("cartpole", **settings)  # type: ignore[arg-type]  # settings by name
    except LifecycleError as error:
        os.write(writing, str(error).encode())
    finally:
        if os.getpid() != parent:
            os._exit(0)
    os.waitpid(children[0], 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert f"belongs to process {parent}" in pipe.read()
    assert result.bundle.run.status == "completed"
    assert read_bundle(result.paths[0]) == result.bundle
    assert result.last.is_file()


def test_it_trains_as_the_command_does() -> None:
    from headrace.cli.main import main

    quick = ["--ppo", "steps=8", "--ppo", "epochs=1", "--ppo", "minibatches=2", "--ppo", "hidden=(8,)"]
    assert main(["train", "cartpole", "--num-envs", "4", "--threads", "1", "--iterations", "2", "--seed", "7", *quick,
                 "--output", "by_command"]) == 0  # fmt: skip
    result = headrace.train(
        "cartpole", num_envs=4, threads=1, iterations=2, seed=7, ppo=QUICK, run=headrace.RunCfg(output="in_python")
    )
    one, other = (torch.load(path, weights_only=True) for path in ("by_command/checkpoints/last.pt", result.last))
    assert one["headrace"]["settings"] == other["headrace"]["settings"]
    assert all(torch.equal(one["state_dict"][name], other["state_dict"][name]) for name in one["state_dict"])


def test_a_recipe_says_what_the_environments_are() -> None:
    recipe = headrace.EnvRecipe("cartpole", num_envs=4, seed=3, threads=1, overrides={"episode_length": 5})
    result = headrace.train(recipe, iterations=1, ppo=QUICK, run=headrace.RunCfg(output="by_recipe"))
    run = result.bundle.run
    assert (run.task, run.num_envs, run.seed, run.config.overrides) == ("cartpole", 4, 3, {"episode_length": 5})
    with pytest.raises(ConfigError, match=r"num_envs: expected that of the recipe, 4, got 99; use recipe.replace"):
        headrace.train(recipe, iterations=1, num_envs=99)
    with pytest.raises(ConfigError, match="num_envs: expected that of the recipe, 4, got 64"):
        headrace.train(recipe, iterations=1, num_envs=64)  # as many as without a recipe
    with pytest.raises(ConfigError, match="seed: expected that of the recipe, 3, got 0"):
        headrace.play(recipe, seed=0)
    with pytest.raises(ConfigError, match="autoreset='same_step' here, got 'disabled'"):
        headrace.train(recipe.replace(autoreset="disabled"), iterations=1)


@pytest.mark.parametrize("library", ["headrace", "rsl_rl", "rl_games", "skrl", "sb3"])
def test_a_bridged_environment_with_dict_observations_trains(library: str) -> None:
    import gymnasium

    if "Reach-v0" not in gymnasium.registry:
        gymnasium.register("Reach-v0", entry_point=Reach)
    result = headrace.train(
        "gym:Reach-v0", library=library, num_envs=4, iterations=2, ppo=QUICK, run=headrace.RunCfg(output="reached")
    )
    assert result.bundle.runtime.episodes is not None
    assert result.bundle.runtime.episodes.completed > 0
    assert result.last.is_file()
    gymnasium.registry.pop("Reach-v0")


def test_what_cannot_work_is_refused_before_anything_is_written() -> None:
    for wrong, message in (
        ({"iterations": 0}, "expected at least 1"),
        ({"library": "rslrl"}, "did you mean 'rsl_rl'"),
        ({"ppo": PPOCfg(reward_scale=2.0)}, "headrace cannot honor reward_scale"),
        ({"ppo": PPOCfg(steps=5), "num_envs": 3}, "divisor"),
        ({"resume_from": "nowhere"}, "nowhere"),
        ({"resume": "nowhere"}, "unknown argument 'resume'"),
        ({"ppo": PPOCfg(memory_size=256)}, "memory_size: expected a memory with it, got memory='none'"),
        ({"ppo": PPOCfg(seed=5)}, "ppo.seed: expected that of the run, 0, or none, got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            headrace.train("cartpole", **{"threads": 1, "run": headrace.RunCfg(output="kept_clean"), **wrong})  # pyright: ignore[reportArgumentType]  # wrong on purpose
    assert not Path("kept_clean").exists()


def test_early_stop_ends_the_training() -> None:
    result = headrace.train(
        "cartpole", num_envs=4, threads=1, iterations=9, ppo=QUICK, overrides={"episode_length": 2},
        stop=SuccessRule(threshold=0.5, window=1), run=headrace.RunCfg(output="stopped"),
    )  # fmt: skip
    assert result.bundle.runtime.iterations_completed == 1
    assert result.bundle.early_stop is not None
    assert result.bundle.early_stop.reached


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_refused_before_a_directory_is_made(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="torch sees no GPU"):
        headrace.train("cartpole", sim="warp", device="cuda", run=headrace.RunCfg(output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
