"""Curves that can be read while a training runs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import headrace
from headrace.errors import ConfigError, UnknownNameError
from headrace.learning import PPOCfg
from headrace.libraries.training import Iteration

SHORT = {"episode_length": 20}
PPO = PPOCfg(steps=32, epochs=1, minibatches=1, hidden=(8,))


def train(log: str, output: Path, **more: Any) -> Any:
    run = headrace.RunCfg(output=output, log=(log,))
    return headrace.train("cartpole", num_envs=4, threads=1, overrides=SHORT, ppo=PPO, iterations=3, run=run, **more)


def test_tensorboard_has_every_iteration_as_soon_as_it_is_done(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    seen: list[list[int]] = []

    def read(name: str) -> dict[int, float]:
        found = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
        found.Reload()
        return {event.step: event.value for event in found.Scalars(name)}

    def look(done: Iteration) -> None:
        seen.append(list(read("Time/collection_s")))

    result = train("tensorboard", tmp_path / "run", on_iteration=look)
    assert seen == [[1], [1, 2], [1, 2, 3]]
    series = result.bundle.learning.reward.series_per_iter
    assert read("Train/mean_reward") == pytest.approx({1 + i: v for i, v in enumerate(series) if v is not None})


def test_weights_and_biases_gets_curves_bundle_and_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in; ``make test-wandb`` runs the genuine one, offline."""
    told: list[Any] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            told.append((step, sorted(values)))

        def log_artifact(self, artifact: Any) -> None:
            told.append(artifact.files)

        def finish(self, exit_code: int) -> None:
            told.append(exit_code)

    class Artifact:
        def __init__(self, name: str, type: str) -> None:  # as its own is called
            self.files: list[str] = []

        def add_file(self, path: str) -> None:
            assert Path(path).stat().st_size
            self.files.append(Path(path).name)

    fake = ModuleType("wandb")
    fake.init = lambda **settings: told.append(settings["config"]["task"]) or Run()  # type: ignore[attr-defined]  # a stand-in
    fake.Artifact = Artifact  # type: ignore[attr-defined]  # likewise
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train("wandb", tmp_path / "run")
    assert told[0] == "cartpole"
    assert [entry[0] for entry in told[1:4]] == [1, 2, 3]
    assert "Train/mean_reward" in told[2][1]
    assert told[4:] == [["training.json", "last.pt"], 0]


def test_a_log_that_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'wandb'"):
        train("wandbb", tmp_path / "run")
    with pytest.raises(ConfigError, match="expected a training"):
        headrace.bench.runtime("cartpole", run=headrace.RunCfg(output=tmp_path / "run", log=("tensorboard",)))
    assert not (tmp_path / "run").exists()
