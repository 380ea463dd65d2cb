"""``headrace train``: bundles, checkpoints, early stops, interrupts and resuming."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from train_play import QUICK, play_bundle, played, said, trained, training_bundle

import headrace
from headrace.cli.main import main

pytestmark = pytest.mark.usefixtures("in_its_own_folder")


@pytest.mark.parametrize("library", ["headrace", "rl_games", "rsl_rl", "sb3", "skrl"])
def test_training_leaves_a_bundle_and_a_checkpoint_that_plays(library: str) -> None:
    threads = torch.get_num_threads(), torch.get_float32_matmul_precision(), str(torch.tensor([1.23456789]))
    running = set(threading.enumerate())
    assert trained("runs/one", "--iterations", "3", library=library) == 0
    bundle = training_bundle("runs/one")
    assert bundle.run.status == "completed"
    assert bundle.run.framework == library
    assert bundle.runtime.iterations_completed == 3
    assert bundle.runtime.frames == 2 * 16 * 8, "the first iteration is the warm-up"
    assert bundle.learning.reward is not None
    split = bundle.time_split_s
    assert split is not None
    total = split.collection + split.learning + split.other
    assert total == pytest.approx(bundle.runtime.total_wall_time_s, rel=1e-6)
    assert split.other >= -0.01  # a library that reads the system's clock may be off by its steps
    assert bundle.checkpoint_path is not None
    assert played("--episodes", "5", "--output", "p") == 0
    play = play_bundle("p")
    assert play.checkpoint is not None
    assert play.checkpoint.source == "latest"
    assert play.checkpoint.iteration == 3
    assert play.reward is not None
    assert play.reward.n == 5
    # global settings and threads are as before both
    after = torch.get_num_threads(), torch.get_float32_matmul_precision(), str(torch.tensor([1.23456789]))
    assert after == threads
    assert set(threading.enumerate()) <= running


@pytest.mark.parametrize("library", ["headrace", "rl_games", "rsl_rl", "sb3", "skrl"])
def test_early_stop_ends_within_one_window_and_says_why(library: str) -> None:
    stop = ("--check-success", "--success-threshold", "1.0", "--success-window", "2", "--set", "episode_length=3")
    assert trained("one", "--iterations", "50", *stop, library=library) == 0
    bundle = training_bundle("one")
    assert bundle.run.status == "completed"
    assert "success rate" in str(bundle.run.status_reason)
    assert bundle.runtime.iterations_completed == 2
    assert bundle.early_stop is not None
    assert bundle.early_stop.iteration == 2


@pytest.mark.parametrize(
    ("raised", "status"), [(RuntimeError("the motor is on fire"), "crashed"), (KeyboardInterrupt(), "interrupted")]
)
@pytest.mark.parametrize("where", ["env", "learner"])
def test_broken_off_training_leaves_a_bundle_and_a_usable_checkpoint(
    where: str, raised: BaseException, status: str
) -> None:
    from headrace.libraries.learner import OwnLearner

    calls = 0
    with pytest.MonkeyPatch.context() as patch:
        if where == "env":
            step = headrace.BatchEnv.step

            def broken(self: headrace.BatchEnv, actions: torch.Tensor, observe: torch.Tensor | None = None) -> object:
                nonlocal calls
                calls += 1
                if calls == 20:  # in the second iteration of 16 steps
                    raise raised
                return step(self, actions, observe)

            patch.setattr(headrace.BatchEnv, "step", broken)
        else:
            improve = OwnLearner.iterate

            def broken_iterate(self: OwnLearner) -> object:
                nonlocal calls
                calls += 1
                found = improve(self)
                if calls == 2:
                    raise raised
                return found

            patch.setattr(OwnLearner, "iterate", broken_iterate)
        if status == "crashed":
            with pytest.raises(RuntimeError, match="on fire"):
                trained("runs/one", "--iterations", "5")
        else:
            assert trained("runs/one", "--iterations", "5") == 130
    bundle = training_bundle("runs/one")
    assert bundle.run.status == status
    assert bundle.runtime.iterations_completed == 1
    assert bundle.checkpoint is not None
    assert main(["play", "cartpole", "--num-envs", "2", "--policy", bundle.checkpoint.path, "--output", "p"]) == 0


@pytest.mark.parametrize("library", ["rl_games", "rsl_rl", "sb3", "skrl"])
def test_an_environment_that_breaks_under_a_library_leaves_bundle_checkpoint_and_no_thread(library: str) -> None:
    step, calls = headrace.BatchEnv.step, 0
    threads, settings = set(threading.enumerate()), (torch.get_num_threads(), torch.is_grad_enabled())

    def broken(self: headrace.BatchEnv, *words: torch.Tensor) -> object:
        nonlocal calls
        calls += 1
        if calls == 20:  # in the second iteration of 16 steps
            raise RuntimeError("the motor is on fire")
        return step(self, *words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headrace.BatchEnv, "step", broken)
        with pytest.raises(RuntimeError, match="on fire"):
            trained("runs/one", "--iterations", "5", library=library)
    bundle = training_bundle("runs/one")
    assert bundle.run.status == "crashed"
    assert bundle.runtime.iterations_completed == 1
    assert bundle.checkpoint is not None
    assert set(threading.enumerate()) <= threads
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == settings
    assert not torch.is_inference_mode_enabled()
    assert played("--policy", bundle.checkpoint.path, "--episodes", "2", "--output", "p") == 0


def test_resumed_training_equals_training_without_a_break() -> None:
    assert trained("whole", "--iterations", "4") == 0
    assert trained("half", "--iterations", "2") == 0
    assert trained("rest", "--iterations", "2", "--resume-from", "half") == 0
    whole, rest = (torch.load(f"{name}/checkpoints/last.pt", weights_only=True) for name in ("whole", "rest"))
    assert rest["headrace"]["iteration"] == 4
    for name, weights in whole["state_dict"].items():
        assert torch.equal(weights, rest["state_dict"][name]), name


def test_a_run_that_cannot_be_resumed_is_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert trained("half", "--iterations", "1") == 0
    said(capsys)
    assert trained("rest", "--resume-from", "half", library="sb3") == 2
    assert "expected a run of sb3, got one of headrace; pass --library headrace" in said(capsys)
    assert trained("rest", "--resume-from", ".") == 2
    assert "expected the directory of a training" in said(capsys)
    assert trained("rest", "--resume-from", "half", "--num-envs", "4") == 2
    assert "its 8 environments are part of its state, got 4; resume it with num_envs=8" in said(capsys)
    assert not Path("rest").exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_training_when_the_iteration_is_whole_and_saved(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import os
    import signal

    step, calls = headrace.BatchEnv.step, 0

    def interrupted(self: headrace.BatchEnv, *words: torch.Tensor) -> object:
        nonlocal calls
        calls += 1
        if calls == 20:  # in the second iteration of 16 steps
            os.kill(os.getpid(), signal.Signals[name])
        return step(self, *words)

    monkeypatch.setattr(headrace.BatchEnv, "step", interrupted)
    assert trained("runs/one", "--iterations", "50") == 128 + signal.Signals[name]
    assert "--resume-from runs/one --iterations 48\n" in capsys.readouterr().err
    bundle = training_bundle("runs/one")
    assert (bundle.run.status, bundle.run.status_reason) == ("interrupted", "Ctrl-C" if name == "SIGINT" else name)
    assert bundle.runtime.iterations_completed == 2
    assert bundle.checkpoint is not None
    assert bundle.checkpoint.iteration == 2
    assert sorted(path.name for path in Path("runs/one/checkpoints").iterdir()) == ["best.pt", "last.pt", "resume-2.pt"]
    assert trained("rest", "--iterations", "1", "--resume-from", "runs/one") == 0


def test_ctrl_c_before_the_first_iteration_offers_nothing_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: headrace.BatchEnv, *words: torch.Tensor) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(headrace.BatchEnv, "step", interrupted)
    assert trained("runs/one", "--iterations", "50") == 130
    assert "continue with" not in capsys.readouterr().err
    assert not Path("runs/one/checkpoint.json").exists()


def test_a_second_ctrl_c_ends_the_training_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    step, calls = headrace.BatchEnv.step, 0

    def impatient(self: headrace.BatchEnv, *words: torch.Tensor) -> object:
        nonlocal calls
        calls += 1
        if calls in (20, 22):
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *words)

    monkeypatch.setattr(headrace.BatchEnv, "step", impatient)
    assert trained("one", "--iterations", "50") == 130
    assert calls == 22 or calls == 23
    assert training_bundle("one").runtime.iterations_completed == 1


def test_a_disk_that_fails_between_two_files_leaves_a_run_that_resumes() -> None:
    from headrace.errors import StorageError
    from headrace.libraries.learner import OwnLearner

    save, calls = OwnLearner.save, 0

    def failing(self: OwnLearner, path: Path, meta: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # last and best of iteration 0, last of iteration 1 or of the end, …
            raise StorageError(28, "the disk is full")
        save(self, path, meta)  # pyright: ignore[reportArgumentType]  # passed on

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.libraries.training._SHARE", 0.0)
        patch.setattr("headrace.libraries.training.time.perf_counter", _Hours())
        patch.setattr(OwnLearner, "save", failing)
        trained("half", "--iterations", "4")
    names = {path.name for path in Path("half/checkpoints").iterdir()}
    kept = torch.load("half/checkpoints/last.pt", weights_only=True)["headrace"]["iteration"]
    assert f"resume-{kept}.pt" in names
    assert trained("rest", "--iterations", "1", "--resume-from", "half") == 0
    assert training_bundle("rest").run.resumed_from.iteration == kept


class _Hours:
    """A clock on which every look is an hour later: a checkpoint is due after each iteration."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 3600.0
        return self._now


def test_resuming_records_what_changed_and_refuses_another_task_before_writing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert trained("half", "--iterations", "1") == 0
    assert (
        trained("rest", "--iterations", "1", "--resume-from", "half", "--ppo", "gamma=0.9", "--set", "max_angle=0.3")
        == 0
    )
    came_from = training_bundle("rest").run.resumed_from.model_dump()
    assert came_from["run_id"] == training_bundle("half").run.run_id
    assert came_from["changed"] == {"gamma": [0.99, 0.9], "task.max_angle": [None, 0.3]}
    shown = said(capsys)
    assert "gamma 0.99 → 0.9" in shown
    assert "task.max_angle None → 0.3" in shown
    assert main(["train", "ant", "--resume-from", "half", "--output", "other", *QUICK]) == 2
    assert "expected a run of task 'ant', got one of 'cartpole'" in said(capsys)
    assert not Path("other").exists()


def test_a_resumed_training_inherits_everything_that_is_not_given_again() -> None:
    words = ["train", "cartpole", "--num-envs", "4", "--seed", "3", "--set", "max_angle=0.3", "--library", "sb3"]
    assert main([*words, "--ppo", "steps=16", "--ppo", "epochs=2", "--iterations", "1", "--output", "a"]) == 0
    assert main(["train", "cartpole", "--resume-from", "a", "--iterations", "1", "--output", "b"]) == 0
    first, second = training_bundle("a"), training_bundle("b")
    assert second.run.resumed_from.changed == {}
    assert second.run.framework == "sb3"
    assert second.library.settings == first.library.settings
    assert second.run.recipe == first.run.recipe
    more = ["--ppo", "epochs=3", "--iterations", "1", "--output", "c"]
    assert main(["train", "cartpole", "--resume-from", "b", *more]) == 0
    third = training_bundle("c")
    assert third.run.resumed_from.changed == {"epochs": [2, 3]}
    assert third.library.settings["steps"] == 16


def test_without_a_terminal_every_iteration_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--num-envs", "4", "--threads", "1", "--iterations", "2", "--ppo", "steps=8", "--output", "t")
    assert main(["train", "cartpole", *words]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("iteration ")]
    assert [line.partition(":")[0] for line in lines] == ["iteration 1 of 2", "iteration 2 of 2"]
