"""``headrace train`` and ``headrace play``: bundles, checkpoints, the chain of where they come from, bad input."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import headrace
from headrace._cli.main import main
from headrace.adapters._curves import read_curves
from headrace.adapters._finding import bare_name, find_checkpoint
from headrace.bench import PlayBundle, TrainingBundle, read_bundle

if TYPE_CHECKING:
    from onnx import GraphProto

QUICK = ("--num-envs", "8", "--threads", "1", "--ppo", "steps=16", "--ppo", "epochs=1", "--ppo", "minibatches=2")


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def trained(folder: str, *more: str, library: str = "headrace") -> int:
    return main(["train", "cartpole", "--library", library, "--output", folder, *QUICK, *more])


def training_bundle(folder: str) -> TrainingBundle:
    bundle = read_bundle(Path(folder) / "training.json")
    assert isinstance(bundle, TrainingBundle)
    return bundle


def play_bundle(folder: str) -> PlayBundle:
    bundle = read_bundle(Path(folder) / "play.json")
    assert isinstance(bundle, PlayBundle)
    return bundle


def played(*more: str, envs: int = 4) -> int:
    return main(["play", "cartpole", "--num-envs", str(envs), "--threads", "1", *more])


def save_onnx(graph: GraphProto, path: Path) -> None:
    """In an older format, that every runtime knows."""
    import onnx

    operators = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(graph, ir_version=10, opset_imports=[operators]), path)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("library", ["headrace", "rl_games", "rsl_rl", "sb3", "skrl"])
def test_training_leaves_a_bundle_and_a_checkpoint_that_plays(library: str) -> None:
    threads = torch.get_num_threads(), torch.get_float32_matmul_precision(), str(torch.tensor([1.23456789]))
    running = set(threading.enumerate())
    assert trained("runs/one", "--iterations", "3", library=library) == 0
    bundle = training_bundle("runs/one")
    assert bundle.run.status == "completed"
    assert bundle.run.framework == library
    assert bundle.runtime.iterations_completed == 3
    assert bundle.runtime.frames == 3 * 16 * 8
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


@pytest.mark.parametrize(
    ("library", "at"),
    [("rl_games", [1, 2, 3]), ("rsl_rl", [0, 1, 2]), ("sb3", [128, 256, 384]), ("skrl", [16, 32, 48])],
)
def test_curves_go_to_tensorboard_under_the_names_of_the_library(library: str, at: list[int]) -> None:
    assert (
        trained("one", "--iterations", "3", "--formatter", "schema", "--formatter", "tensorboard", library=library) == 0
    )
    learning = training_bundle("one").learning
    assert learning.reward is not None
    assert learning.ep_length is not None
    curves = read_curves(Path("one"), library)
    known = [place for place, value in zip(at, learning.reward.series_per_iter or [], strict=True) if value is not None]
    assert curves.at == known
    # TensorBoard keeps float32
    assert curves.reward == pytest.approx([v for v in learning.reward.series_per_iter or [] if v is not None], rel=1e-6)
    assert curves.length == pytest.approx([v for v in learning.ep_length.series_per_iter or [] if v is not None])


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
    from headrace.adapters.own._learner import OwnLearner

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
    assert main(["play", "cartpole", "--num-envs", "2", "--checkpoint", bundle.checkpoint.path, "--output", "p"]) == 0


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
    assert played("--checkpoint", bundle.checkpoint.path, "--episodes", "2", "--output", "p") == 0


def test_resumed_training_equals_training_without_a_break() -> None:
    assert trained("whole", "--iterations", "4") == 0
    assert trained("half", "--iterations", "2") == 0
    assert trained("rest", "--iterations", "2", "--resume", "half") == 0
    whole, rest = (torch.load(f"{name}/checkpoints/last.pt", weights_only=True) for name in ("whole", "rest"))
    assert rest["headrace"]["iteration"] == 4
    for name, weights in whole["state_dict"].items():
        assert torch.equal(weights, rest["state_dict"][name]), name


def test_a_run_that_cannot_be_resumed_is_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert trained("half", "--iterations", "1") == 0
    said(capsys)
    assert trained("rest", "--resume", "half", library="sb3") == 2
    assert "expected a run of sb3, got one of headrace; pass --library headrace" in said(capsys)
    assert trained("rest", "--resume", ".") == 2
    assert "expected the directory of a training" in said(capsys)
    assert not Path("rest").exists()


def test_published_checkpoint_plays_where_nothing_was_trained() -> None:
    assert played("--output", "p", envs=8) == 0
    bundle = play_bundle("p")
    assert bundle.checkpoint is not None
    assert bundle.checkpoint.source == "published"
    assert bundle.checkpoint.library == "headrace"
    assert bundle.reward is not None
    assert bundle.reward.n == 8
    assert bundle.reward.mean > 285.0
    assert bundle.success_rate is not None
    assert bundle.success_rate.rate == 1.0


def test_episodes_of_a_plan_are_the_same_whatever_the_number_of_environments() -> None:
    found: list[list[float]] = []
    for envs in (1, 3, 7):
        assert played("--episodes", "7", "--output", f"p{envs}", "--set", "max_angle=0.24", envs=envs) == 0
        bundle = play_bundle(f"p{envs}")
        assert bundle.reward is not None
        assert bundle.per_env is not None
        assert sum(bundle.per_env.episodes) == 7
        found.append(sorted(bundle.reward.samples or []))
    # rows of a matrix product change by rounding with the number of rows
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] == pytest.approx(found[2], rel=1e-4)


def test_success_reward_and_length_are_of_whole_episodes_counted_by_hand(tmp_path: Path) -> None:
    (tmp_path / "leaning.py").write_text(
        "import torch\ndef left(obs):\n    return torch.full((len(obs['policy']), 1), -1.0)\n"
    )
    sys.modules.pop("leaning", None)
    assert main(["play", "cartpole", "--num-envs", "3", "--num-steps", "60", "--checkpoint", "leaning:left",
                 "--output", "p"]) == 0  # fmt: skip
    bundle = play_bundle("p")
    env = headrace.make("cartpole", 3, seed=0, threads=1)
    env.reset(seed=0)
    running, rewards, lengths, slots = [0.0] * 3, [], [], []
    steps = [0] * 3
    for _ in range(60):
        _, reward, terminated, truncated, _ = env.step(torch.full((3, 1), -1.0))
        for slot in range(3):
            running[slot] += float(reward[slot])
            steps[slot] += 1
            if terminated[slot] or truncated[slot]:
                rewards.append(running[slot])
                lengths.append(steps[slot])
                slots.append(slot)
                running[slot], steps[slot] = 0.0, 0
    assert bundle.reward is not None
    assert bundle.ep_length is not None
    assert bundle.per_env is not None
    assert bundle.reward.samples == pytest.approx(rewards, rel=1e-5)  # float32 rewards against float64 sums
    assert bundle.ep_length.samples == [float(length) for length in lengths]
    assert bundle.per_env.episodes == [slots.count(slot) for slot in range(3)]
    assert bundle.success_rate is not None
    assert bundle.success_rate.successes == 0
    assert bundle.runtime.episodes is not None
    assert bundle.runtime.episodes.unfinished == sum(count > 0 for count in steps)


def test_too_few_steps_are_said_and_nothing_unfinished_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert played("--num-steps", "10", "--output", "p") == 0
    assert "shorter than an episode" in said(capsys)
    bundle = play_bundle("p")
    assert bundle.reward is None
    assert bundle.plan is not None
    assert bundle.plan.shorter_than_episode
    assert bundle.runtime.episodes is not None
    assert bundle.runtime.episodes.unfinished == 4


def test_torchscript_onnx_and_functions_play_alike(tmp_path: Path) -> None:
    import warnings

    from onnx import TensorProto, helper, numpy_helper

    weight = torch.tensor([[0.1, 6.0, 0.3, 1.5]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        layer = torch.nn.Linear(4, 1, bias=False)
        layer.weight.data.copy_(weight)
        torch.jit.trace(layer, torch.zeros(1, 4)).save(str(tmp_path / "policy.pt"))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["obs", "w"], ["actions"])],
        "policy",
        [helper.make_tensor_value_info("obs", TensorProto.FLOAT, [None, 4])],
        [helper.make_tensor_value_info("actions", TensorProto.FLOAT, [None, 1])],
        [numpy_helper.from_array(weight.T.contiguous().numpy(), "w")],
    )
    save_onnx(graph, tmp_path / "policy.onnx")
    (tmp_path / "by_hand.py").write_text(
        "import torch\nW = torch.tensor([[0.1, 6.0, 0.3, 1.5]])\ndef act(obs):\n    return obs['policy'] @ W.T\n"
    )
    sys.modules.pop("by_hand", None)
    found = {}
    for name in ("policy.pt", "policy.onnx", "by_hand:act"):
        assert played("--checkpoint", name, "--output", name.replace(":", "-") + "-out") == 0
        bundle = play_bundle(name.replace(":", "-") + "-out")
        assert bundle.reward is not None
        assert bundle.policy is not None
        found[bundle.policy.kind] = bundle.reward.samples
    assert set(found) == {"torchscript", "onnx", "callable"}
    assert found["torchscript"] == pytest.approx(found["callable"], rel=1e-4)
    assert found["onnx"] == pytest.approx(found["callable"], rel=1e-4)


def test_damaged_onnx_file_and_one_with_two_inputs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from onnx import TensorProto, helper

    shape = [None, 4]
    graph = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["actions"])],
        "two",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("a", "b")],
        [helper.make_tensor_value_info("actions", TensorProto.FLOAT, shape)],
    )
    save_onnx(graph, tmp_path / "2.onnx")
    (tmp_path / "cut.onnx").write_bytes((tmp_path / "2.onnx").read_bytes()[:40])
    assert played("--checkpoint", "2.onnx", "--output", "a") == 2
    assert "one input" in said(capsys)
    assert played("--checkpoint", "cut.onnx", "--output", "b") == 2
    assert "not an ONNX file" in said(capsys)


def test_play_films_every_step_and_never_over_another_film(capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.recording._video import frame_times

    words = ("--num-steps", "6", "--video", "film.mp4")
    assert played(*words, "--output", "p") == 0
    assert len(frame_times(Path("film.mp4"))) == 6
    assert play_bundle("p").video_path == "film.mp4"
    assert played(*words, "--output", "again") == 2
    assert "already exists" in said(capsys)
    assert not Path("again").exists()


def test_a_chunk_policy_plays_and_other_forms_of_the_result_are_written() -> None:
    forms = ("--formatter", "schema", "--formatter", "summary")
    words = ("--num-envs", "4", "--threads", "1", "--num-steps", "40", "--output", "p")
    assert main(["play", "pusher-solid", *words, *forms]) == 0
    bundle = play_bundle("p")
    assert bundle.policy is not None
    assert bundle.policy.kind == "chunk"
    assert bundle.runtime.frames == 160
    assert "pusher-solid" in Path("p/play_summary.txt").read_text()


def test_sampled_actions_are_others_than_the_mean_ones_and_the_same_for_a_seed() -> None:
    found = []
    for name, how in (("mean", "--deterministic"), ("one", "--stochastic"), ("two", "--stochastic")):
        assert played(how, "--episodes", "3", "--set", "episode_length=20", "--output", name) == 0
        bundle = play_bundle(name)
        assert bundle.policy is not None
        assert bundle.policy.deterministic == (name == "mean")
        assert bundle.reward is not None
        found.append(bundle.reward.samples)
    assert found[0] != found[1]
    assert found[1] == found[2]


@pytest.mark.parametrize("episodes", [1, 5, 8, 11])
def test_every_planned_episode_is_played_once_and_no_other(episodes: int) -> None:
    """Three environments: fewer episodes than them, and numbers that do not come out even."""
    assert played("--episodes", str(episodes), "--set", "episode_length=7", "--output", "p", envs=3) == 0
    bundle = play_bundle("p")
    assert bundle.reward is not None
    assert bundle.reward.n == episodes
    assert bundle.per_env is not None
    assert bundle.per_env.episodes == [len(range(slot, episodes, 3)) for slot in range(3)]
    assert bundle.runtime.frames == episodes * 7  # nothing was stepped that nobody counts
    assert bundle.plan is not None
    assert (bundle.plan.kind, bundle.plan.episodes_planned) == ("episodes", episodes)
    assert bundle.runtime.episodes is not None
    assert bundle.runtime.episodes.unfinished == 0


def test_chain_takes_the_newest_run_then_the_published_one(tmp_path: Path) -> None:
    assert find_checkpoint(None, "cartpole").source == "published"
    for name, score, moment in (("run_9", 5.0, 1.0), ("run_10", 3.0, 2.0)):
        folder = tmp_path / "runs" / name / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "last.pt").touch()
        index = {"task": "cartpole", "library": "skrl", "last": "checkpoints/last.pt", "best": "checkpoints/best.pt"}
        index |= {"iteration": 1, "score": score, "best_score": score, "saved_at": moment}
        (folder.parent / "checkpoint.json").write_text(json.dumps(index))
    assert find_checkpoint(None, "cartpole").path.parts[-3] == "run_10"
    assert find_checkpoint("latest", "cartpole", library="skrl").path.parts[-3] == "run_10"
    assert find_checkpoint("best", "cartpole").path.parts[-3:] == ("run_9", "checkpoints", "best.pt")
    assert find_checkpoint(None, "cartpole", library="headrace").source == "published"
    assert bare_name("my.module:cartpole-Play") == "cartpole"


def test_checkpoint_is_fetched_from_a_uri(tmp_path: Path) -> None:
    published = find_checkpoint("published", "cartpole").path
    assert played("--checkpoint", f"file://{published}", "--output", "p") == 0
    bundle = play_bundle("p")
    assert bundle.checkpoint is not None
    assert bundle.checkpoint.uri == f"file://{published}"


def test_every_published_checkpoint_is_the_one_of_the_manifest() -> None:
    import hashlib
    from importlib.resources import files

    from headrace._published import published

    for name, entry in published().items():
        content = files("headrace").joinpath("checkpoints", entry["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], name
        assert entry["made_by"]
        assert len(content) < 900_000, name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "cartpole", "--success-window", "20"), "--success-window: expected --check-success with it"),
        (("train", "cartpole", "--success-threshold", "0.5"), "--success-threshold: expected --check-success with it"),
        (("train", "cartpole", "--success-rule", "each"), "--success-rule: expected --check-success with it"),
        (("train", "cartpole", "--library", "rsl-rl"), "did you mean 'rsl_rl'"),
        (("train", "cartpol"), "did you mean 'cartpole'"),
        (("train", "cartpole", "--iterations", "0"), "--iterations"),
        (("train", "cartpole", "--ppo", "lerning_rate=1"), "did you mean 'learning_rate'"),
        (("train", "cartpole", "--num-envs", "3", "--ppo", "steps=5"), "divisor"),
        (("train", "ant", "--check-success", "--iterations", "1"), "success measure"),
        (("train", "cartpole-discrete", "--iterations", "1"), "continuous actions"),
        (("play", "cartpole", "--checkpoint", "nothing.pt"), "nothing there"),
        (("play", "cartpole", "--checkpoint", "no_such_module:f"), "cannot be imported"),
        (("play", "cartpole", "--checkpoint", "http://127.0.0.1:9/x.pt"), "cannot be fetched"),
        (("play", "humanoid"), "--checkpoint"),
        (("play", "cartpole", "--checkpoint", "best"), "no training"),
        (("play", "cartpole", "--library", "sb4"), "did you mean 'sb3'"),
    ],
)
def test_bad_input_is_refused_with_a_hint(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    assert words in said(capsys)


def test_checkpoints_of_another_task_or_library_and_damaged_ones_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = find_checkpoint("published", "cartpole").path
    assert main(["play", "ant", "--checkpoint", str(published)]) == 2
    assert "task 'ant', got one of 'cartpole'" in said(capsys)
    assert played("--checkpoint", str(published), "--library", "skrl") == 2
    assert "of skrl, got one of headrace" in said(capsys)
    content = published.read_bytes()
    damaged = bytearray(content)
    for place in range(len(content) // 2, len(content) // 2 + 600):  # more than the padding between two tensors
        damaged[place] ^= 0xFF
    for name, part in (("cut.pt", content[: len(content) // 2]), ("bits.pt", bytes(damaged)), ("not.pt", b"hello")):
        (tmp_path / name).write_bytes(part)
        assert played("--checkpoint", name) == 2, name
        assert "error" in said(capsys)
    torch.save({"model": print, "optimizer": {}, "epoch": 1}, tmp_path / "code.pt")
    assert played("--checkpoint", "code.pt") == 2
    assert "--trust-checkpoint" in said(capsys)


def test_missing_extra_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rsl_rl", None)
    assert main(["train", "cartpole", "--library", "rsl_rl"]) == 2
    assert "headrace[rsl-rl]" in said(capsys)


@pytest.mark.parametrize("command", ["play", "evaluate"])
def test_a_signal_while_playing_is_reported_as_that_signal(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    step, calls = headrace.BatchEnv.step, 0

    def interrupted(self: headrace.BatchEnv, *words: torch.Tensor, **more: torch.Tensor) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *words, **more)

    monkeypatch.setattr(headrace.BatchEnv, "step", interrupted)
    shape = "1" if command == "play" else "1, 1"  # actions, chunks of one action
    Path("pushing.py").write_text(
        f"import torch\ndef push(obs):\n    return torch.zeros(len(obs['policy']), {shape})\n"
    )
    sys.modules.pop("pushing", None)
    if command == "play":
        assert played("--checkpoint", "pushing:push", "--output", "p") == 128 + signal.SIGTERM
        run = play_bundle("p").run
        assert (run.status, run.status_reason) == ("interrupted", "SIGTERM")
    else:
        words = ["evaluate", "cartpole", "--policy", "pushing:push", "--horizon", "1", "--threads", "1"]
        assert main([*words, "--episodes", "4"]) == 128 + signal.SIGTERM


def test_ctrl_c_ends_the_training_when_the_iteration_is_whole_and_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    step, calls = headrace.BatchEnv.step, 0

    def interrupted(self: headrace.BatchEnv, *words: torch.Tensor) -> object:
        nonlocal calls
        calls += 1
        if calls == 20:  # in the second iteration of 16 steps
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *words)

    monkeypatch.setattr(headrace.BatchEnv, "step", interrupted)
    assert trained("runs/one", "--iterations", "50") == 130
    bundle = training_bundle("runs/one")
    assert bundle.run.status == "interrupted"
    assert bundle.runtime.iterations_completed == 2
    assert bundle.checkpoint is not None
    assert bundle.checkpoint.iteration == 2
    assert sorted(path.name for path in Path("runs/one/checkpoints").iterdir()) == ["best.pt", "last.pt", "resume-2.pt"]
    assert trained("rest", "--iterations", "1", "--resume", "runs/one") == 0


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
    from headrace.adapters.own._learner import OwnLearner
    from headrace.errors import StorageError

    save, calls = OwnLearner.save, 0

    def failing(self: OwnLearner, path: Path, meta: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # last and best of iteration 0, last of iteration 1 or of the end, …
            raise StorageError(28, "the disk is full")
        save(self, path, meta)  # pyright: ignore[reportArgumentType]  # passed on

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.adapters._training._SHARE", 0.0)
        patch.setattr("headrace.adapters._training.time.perf_counter", _Hours())
        patch.setattr(OwnLearner, "save", failing)
        trained("half", "--iterations", "4")
    names = {path.name for path in Path("half/checkpoints").iterdir()}
    kept = torch.load("half/checkpoints/last.pt", weights_only=True)["headrace"]["iteration"]
    assert f"resume-{kept}.pt" in names
    assert trained("rest", "--iterations", "1", "--resume", "half") == 0
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
    assert trained("rest", "--iterations", "1", "--resume", "half", "--ppo", "gamma=0.9", "--set", "max_angle=0.3") == 0
    came_from = training_bundle("rest").run.resumed_from.model_dump()
    assert came_from["changed"] == {"gamma": [0.99, 0.9], "task.max_angle": [None, 0.3]}
    said(capsys)
    assert main(["train", "ant", "--resume", "half", "--output", "other", *QUICK]) == 2
    assert "expected a run of task 'ant', got one of 'cartpole'" in said(capsys)
    assert not Path("other").exists()


def test_one_broken_run_does_not_keep_others_from_being_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert trained("runs/one", "--iterations", "1") == 0
    Path("runs/broken").mkdir()
    Path("runs/broken/checkpoint.json").write_text("[" * 100_000)
    assert played("--episodes", "2", "--output", "p") == 0
    shutil.rmtree("runs/one")
    assert played("--checkpoint", "latest", "--output", "q") == 2
    assert "runs/broken/checkpoint.json" in said(capsys)


def test_an_sb3_archive_with_a_bad_policy_is_an_error_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    import zipfile

    assert trained("one", "--iterations", "1", library="sb3") == 0
    with zipfile.ZipFile("one/checkpoints/last.zip") as good, zipfile.ZipFile("bad.zip", "w") as bad:
        for name in good.namelist():
            bad.writestr(name, b"not weights" if name == "policy.pth" else good.read(name))
    assert played("--checkpoint", "bad.zip", "--output", "p") == 2
    assert "not a checkpoint of sb3, or cut off" in said(capsys)


def test_a_trusted_file_of_our_own_learner_is_loaded_and_an_untrusted_one_executes_nothing() -> None:
    assert trained("one", "--iterations", "1") == 0
    content = torch.load("one/checkpoints/last.pt", weights_only=True)
    torch.save({**content, "more": _Executes()}, "more.pt")
    assert played("--checkpoint", "more.pt", "--output", "p") == 2
    assert not Path("executed").exists()
    assert played("--checkpoint", "more.pt", "--trust-checkpoint", "--output", "p") == 0
    assert Path("executed").exists()


class _Executes:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("executed"),)
