"""What is measured in a training and a play, and what is not: the first step, warming up, filming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headrace
from headrace.bench.comparison import CompareCfg, compare
from headrace.errors import ConfigError
from headrace.learning import PPOCfg
from headrace.libraries.training import read_index
from headrace.recording import FilmCfg

QUICK = PPOCfg(steps=8, epochs=1, minibatches=2, hidden=(8,))
SMALL = {"num_envs": 4, "threads": 1}


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_play_warms_up_outside_of_what_it_measures() -> None:
    result = headrace.play(
        "cartpole", policy="published", episodes=4, warmup_steps=20, run=headrace.RunCfg(output="p"), **SMALL
    )
    runtime = result.bundle.runtime
    assert runtime.startup_time_s.first_step > 0
    assert runtime.warmup.steps >= 20
    assert result.bundle.per_episode.episode_ids == [0, 1, 2, 3]
    assert runtime.iterations_completed == max(result.bundle.per_episode.lengths), "steps of the plan, no others"
    assert runtime.episodes.completed == 4


@pytest.mark.parametrize("deterministic", [True, False])
def test_episodes_do_not_depend_on_warming_up(deterministic: bool) -> None:
    rows = [
        headrace.play(
            "cartpole", policy="published", episodes=4, warmup_steps=steps, run=headrace.RunCfg(output=str(steps)),
            deterministic=deterministic, **SMALL,
        ).bundle.per_episode
        for steps in (0, 1, 30)
    ]  # fmt: skip
    assert rows[0] == rows[1] == rows[2]


def test_no_warm_up_calls_the_policy_for_the_plan_only() -> None:
    result = headrace.play(
        "cartpole", policy="published", episodes=4, warmup_steps=0, run=headrace.RunCfg(output="p"), **SMALL
    )
    assert result.bundle.runtime.warmup is None
    assert result.bundle.runtime.startup_time_s.first_step is None
    with pytest.raises(ConfigError, match="--warmup-steps"):
        headrace.play("cartpole", policy="published", warmup_steps=-1, **SMALL)


def test_a_first_film_has_only_the_steps_of_the_plan() -> None:
    import av

    result = headrace.play(
        "cartpole",
        policy="published",
        episodes=4,
        film=FilmCfg(video="film.mp4"),
        run=headrace.RunCfg(output="p"),
        **SMALL,
    )
    with av.open("film.mp4") as film:
        assert sum(1 for _ in film.decode(video=0)) == result.bundle.runtime.iterations_completed


@pytest.mark.parametrize("library", ["headrace", "rsl_rl"])
def test_the_first_step_of_a_training_is_a_phase_of_its_start_and_changes_nothing(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.bench import stepping as _stepping

    with_step = headrace.train(
        "cartpole", library=library, iterations=2, ppo=QUICK, run=headrace.RunCfg(output="a"), **SMALL
    )
    runtime = with_step.bundle.runtime
    assert runtime.startup_time_s.first_step > 0
    assert (runtime.iterations_completed, runtime.frames) == (2, 32), "the first iteration is the warm-up"
    monkeypatch.setattr(_stepping, "first_step", lambda env: None)
    without = headrace.train(
        "cartpole", library=library, iterations=2, ppo=QUICK, run=headrace.RunCfg(output="b"), **SMALL
    )
    assert with_step.bundle.learning.reward == without.bundle.learning.reward
    key = "state_dict" if library == "headrace" else "actor_state_dict"
    one, other = (torch.load(result.last, weights_only=True)[key] for result in (with_step, without))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_bundles_of_camera_tasks_name_the_renderer() -> None:
    trained = headrace.train("cartpole-camera", iterations=1, ppo=QUICK, run=headrace.RunCfg(output="t"), **SMALL)
    assert trained.bundle.run.config.rendering_backend == "native"
    played = headrace.play(
        "cartpole-camera", policy="published", num_steps=2, warmup_steps=0, run=headrace.RunCfg(output="p"), **SMALL
    )
    assert played.bundle.run.config.rendering_backend == "native"
    assert headrace.train("cartpole", iterations=1, ppo=QUICK, **SMALL).bundle.run.config.rendering_backend is None


def test_a_training_is_filmed_at_intervals() -> None:
    import av

    result = headrace.train(
        "cartpole",
        iterations=5,
        ppo=QUICK,
        film=FilmCfg(video="film.mp4", interval=2),
        run=headrace.RunCfg(output="t"),
        **SMALL,
    )
    assert result.bundle.video_path == "film.mp4"
    with av.open("film.mp4") as film:
        assert sum(1 for _ in film.decode(video=0)) == 3 * 8, "iterations 1, 2 and 4, of 8 steps"
    plain = headrace.train("cartpole", iterations=5, ppo=QUICK, run=headrace.RunCfg(output="u"), **SMALL).bundle
    assert plain.learning.reward == result.bundle.learning.reward, "filming changes nothing"
    with pytest.raises(ConfigError, match="filmed: True and False"):
        compare([result.bundle], [plain])
    compare([result.bundle], [plain], CompareCfg(allow=frozenset({"settings"})))


@pytest.mark.parametrize(
    ("task", "more", "word"),
    [
        ("cartpole", {"video": "there.mp4"}, "already exists"),
        ("cartpole", {"video": "new.mp4", "interval": 0}, "--video-interval"),
        ("gym:Pendulum-v1", {"video": "new.mp4"}, "expected a task of ours to film"),
    ],
)
def test_a_film_that_cannot_be_made_is_refused_before_training(task: str, more: dict[str, object], word: str) -> None:
    Path("there.mp4").touch()
    with pytest.raises(ConfigError, match=word):
        headrace.train(task, iterations=1, ppo=QUICK, film=FilmCfg(**more), run=headrace.RunCfg(output="t"), num_envs=4)
    assert not Path("t").exists()


def test_a_callback_that_raises_leaves_the_iteration_that_it_was_told_of() -> None:
    def stop(done: object) -> None:
        if done.number == 3:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        headrace.train("cartpole", iterations=9, ppo=QUICK, on_iteration=stop, run=headrace.RunCfg(output="t"), **SMALL)
    assert read_index(Path("t")).iteration == 3
    again = headrace.train(
        "cartpole", iterations=1, ppo=QUICK, resume_from="t", run=headrace.RunCfg(output="u"), **SMALL
    )
    assert again.bundle.run.resumed_from.iteration == 3
