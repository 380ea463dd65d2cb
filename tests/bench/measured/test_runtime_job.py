"""The benchmark jobs from Python: one call each, recipes included."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

import headrace
from headrace.bench.benchmark import rendering_backend
from headrace.errors import ConfigError, LifecycleError
from headrace.files import Lock

QUICK = {"num_steps": 4, "warmup_steps": 0}


def test_a_recipe_is_measured_as_it_says_and_nothing_else_is_heard(tmp_path: Path) -> None:
    overrides = {"episode_length": 7, "decimation": 1}
    recipe = headrace.EnvRecipe("cartpole", num_envs=3, seed=6, overrides=overrides, threads=1)
    with pytest.raises(ConfigError, match="seed: expected that of the recipe, 6, got 0"):
        headrace.bench.runtime(recipe, seed=0, run=headrace.RunCfg(output=tmp_path / "out"), **QUICK)
    with pytest.raises(ConfigError, match="autoreset='same_step' here, got 'disabled'"):
        headrace.bench.runtime(
            recipe.replace(autoreset="disabled"), run=headrace.RunCfg(output=tmp_path / "out"), **QUICK
        )
    result = headrace.bench.runtime(
        recipe, num_envs=3, overrides=dict(overrides), run=headrace.RunCfg(output=tmp_path / "out"), **QUICK
    )
    run = result.bundle.run
    assert (run.task, run.num_envs, run.seed, run.config.threads) == ("cartpole", 3, 6, 1)
    assert run.config.overrides == {"episode_length": 7, "decimation": 1}
    assert result.bundle.runtime.frames == 12
    assert result.paths == (tmp_path / "out" / "runtime.json",)
    assert result.directory == tmp_path / "out"
    assert headrace.EnvRecipe.from_json(run.recipe) == recipe, "the bundle says how to make the environments again"


def test_without_forms_nothing_is_written(tmp_path: Path) -> None:
    result = headrace.bench.runtime(
        "cartpole", num_envs=2, run=headrace.RunCfg(formatters=(), output=tmp_path / "out"), **QUICK
    )
    assert result.paths == ()
    assert list(tmp_path.glob("out/*.json")) == []


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_the_workers_of_a_bridges_recipe_step_it(tmp_path: Path, executor: str) -> None:
    recipe = headrace.EnvRecipe("gym:CartPole-v1", num_envs=2, executor=executor, workers=2)  # pyright: ignore[reportArgumentType]  # a literal
    run = headrace.bench.runtime(recipe, run=headrace.RunCfg(output=tmp_path / "out"), **QUICK).bundle.run
    assert (run.config.executor, run.config.threads) == (executor, 2)
    assert headrace.EnvRecipe.from_json(run.recipe) == recipe


@pytest.mark.parametrize("renderer", ["native", "drawn_by_hand"])
def test_a_bundle_names_the_renderer_of_the_images(renderer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.sim.camera import names as _camera_names

    # a camera of our own, since not every machine has another one; it draws as the native one does
    monkeypatch.setattr(_camera_names, "_REGISTERED", {})
    _camera_names.register_camera(
        "drawn_by_hand", lambda model, spec, threads: _camera_names.make_camera("native", model, spec, threads=threads)
    )
    overrides = {"images.policy.renderer": renderer}
    with closing(headrace.make("cartpole-camera-terms", threads=1, overrides=overrides)) as env:
        assert rendering_backend(env) == renderer
    with closing(headrace.make("cartpole", threads=1)) as env:
        assert rendering_backend(env) is None


def test_an_argument_that_no_job_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'num_envs'"):
        headrace.bench.runtime("cartpole", num_env=2)  # pyright: ignore[reportCallIssue]  # that is the point


def test_two_runs_with_one_output_are_not_both_begun(tmp_path: Path) -> None:
    headrace.bench.runtime("cartpole", num_envs=2, run=headrace.RunCfg(output=tmp_path / "out"), **QUICK)
    with pytest.raises(ConfigError, match="expected a directory without runtime"):
        headrace.bench.runtime("cartpole", num_envs=2, run=headrace.RunCfg(output=tmp_path / "out"), **QUICK)
    (tmp_path / "busy").mkdir()
    with closing(Lock(tmp_path / "busy")), pytest.raises(LifecycleError, match="is writing here"):
        headrace.bench.runtime("cartpole", num_envs=2, run=headrace.RunCfg(output=tmp_path / "busy"), **QUICK)


def test_an_impossible_setting_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        headrace.bench.runtime(
            "cartpole", overrides={"episode_lenght": 3}, run=headrace.RunCfg(output=tmp_path / "out"), **QUICK
        )
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="unknown setting"):
        headrace.bench.startup(
            "cartpole", overrides={"no_such_setting": 1}, run=headrace.RunCfg(output=tmp_path / "out")
        )
    assert not (tmp_path / "out").exists()


def test_bundles_and_directories_are_compared_alike(tmp_path: Path) -> None:
    runs = [
        headrace.bench.runtime("cartpole", num_envs=2, run=headrace.RunCfg(output=tmp_path / name), **QUICK)
        for name in ("a", "b")
    ]
    by_path = headrace.compare(tmp_path / "a", tmp_path / "b")
    by_bundle = headrace.compare(runs[0].bundle, [runs[1].bundle])
    assert by_path.comparisons == by_bundle.comparisons
    assert by_path.inconclusive
    assert not by_path.regressed
    assert "inconclusive" in by_path.markdown()


@pytest.mark.parametrize(
    ("command", "vary", "message"),
    [
        (["dance", "cartpole"], {"threads": [1, 2]}, "expected one of runtime"),
        (["runtime"], {"threads": [1, 2]}, "expected a task"),
        (["runtime", "cartpole", "--seed", "1"], {"threads": [1, 2]}, "expected --seed before"),
        (["runtime", "cartpole"], {"threads": [1, 2], "sim": ["a"]}, "one option to vary"),
        (["runtime", "cartpole"], {"threads": [1]}, "at least two sides"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(
    tmp_path: Path, command: list[str], vary: dict[str, list[object]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        headrace.bench.sweep(command, vary=vary, output=tmp_path / "out")
