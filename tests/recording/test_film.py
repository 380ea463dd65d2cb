from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headrace
from headrace import EnvRecipe
from headrace.errors import ConfigError
from headrace.recording import FilmCfg


def test_the_run_is_filmed_while_the_block_runs(tmp_path: Path) -> None:
    cfg = FilmCfg(video=tmp_path / "run.mp4")
    cfg.check()
    env = headrace.make("cartpole", 2)
    with cfg.film(env):
        env.reset()
        env.step(torch.zeros(2, 1))
    env.close()
    assert (tmp_path / "run.mp4").stat().st_size > 0
    with pytest.raises(ConfigError, match="already exists"):
        cfg.check()


def test_without_a_file_nothing_is_filmed() -> None:
    env = headrace.make("cartpole", 1)
    with FilmCfg().film(env) as observer:
        assert observer is None
    env.close()


def test_only_selected_episodes_are_filmed_again(tmp_path: Path) -> None:
    failures, named = FilmCfg(episodes="failures", directory=tmp_path), FilmCfg(episodes=(1, 4))
    assert [failures.selects(0, outcome) for outcome in (True, False, None)] == [False, True, False]
    assert [named.selects(episode, None) for episode in (0, 1, 4)] == [False, True, True]
    assert not FilmCfg().selects(0, False)
    assert failures.episode_path(7) == tmp_path / "episode-000007.mp4"


def test_films_that_cannot_be_made_are_refused_before_the_work(tmp_path: Path) -> None:
    recipe = EnvRecipe("cartpole")
    cfg = FilmCfg(episodes=(1,), directory=tmp_path)
    cfg.check_episodes(range(3), recipe)
    with pytest.raises(ConfigError, match="expected episodes of the plan, got 1"):
        cfg.check_episodes([0], recipe)
    with pytest.raises(ConfigError, match="a task of ours"):
        cfg.check_episodes([1], None)
    (tmp_path / "episode-000001.mp4").touch()
    with pytest.raises(ConfigError, match="already exists"):
        cfg.check_episodes([1], recipe)
    with pytest.raises(ConfigError, match="'failures' or episode ids"):
        FilmCfg(episodes="successes")  # type: ignore[arg-type]  # as a user may write
    with pytest.raises(ConfigError, match="--video-interval"):
        FilmCfg(interval=0)
    with pytest.raises(ConfigError, match=r"renderer|camera"):
        FilmCfg(renderer="gll").check()
