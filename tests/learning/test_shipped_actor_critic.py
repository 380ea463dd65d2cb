"""The policies of the small learner that ship: what the manifest says of them is so, and they do their tasks."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import headrace
from headrace import _published
from headrace.errors import DataError
from headrace.learning.actor_critic import SavedPolicy, list_shipped_actor_critics, load_actor_critic

NAMES = ["cartpole", "cartpole-camera"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mean_return(saved: SavedPolicy, episodes: int) -> float:
    env = headrace.make(
        saved.task, episodes, seed=77, threads=1, overrides=saved.overrides, autoreset="disabled", final_obs=False
    )
    obs, _ = env.reset()
    returns: list[float] = []
    while len(returns) < episodes:
        step = env.step(saved.act(obs))
        obs = step.obs
        returns += step.info["ends"].returns.tolist() if "ends" in step.info else []
    return sum(returns) / episodes


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_file_is_small_and_the_one_in_the_manifest(name: str) -> None:
    entry = list_shipped_actor_critics()[name]
    content = files("headrace").joinpath("checkpoints", entry["file"]).read_bytes()
    assert len(content) < 500_000
    assert hashlib.sha256(content).hexdigest() == entry["sha256"]
    assert load_actor_critic(name).task == entry["task"]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_policy_scores_what_the_manifest_says(name: str) -> None:
    # episodes of a good policy differ by a few points; 16 held-out ones are within 5 % of the stated hundred
    score = list_shipped_actor_critics()[name]["score"]["value"]
    assert mean_return(load_actor_critic(name), 16) == pytest.approx(score, rel=0.05)
    assert score > 280


def test_a_file_that_was_tampered_with_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(str(files("headrace").joinpath("checkpoints")), tmp_path, dirs_exist_ok=True)
    with (tmp_path / "cartpole.pt").open("r+b") as file:
        file.seek(100)
        file.write(b"?")
    monkeypatch.setattr(_published, "_folder", lambda: tmp_path)
    with pytest.raises(DataError, match=r"not the one in manifest\.json"):
        load_actor_critic("cartpole")
