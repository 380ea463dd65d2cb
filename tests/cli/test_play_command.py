"""``headrace play``: whole episodes, counted once, of every kind of policy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from train_play import play_bundle, played, said, save_onnx

import headrace
from headrace.cli.main import main

pytestmark = pytest.mark.usefixtures("in_its_own_folder")


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
        assert bundle.per_episode is not None
        assert bundle.per_episode.episode_ids == list(range(7))
        found.append(sorted(bundle.reward.samples or []))
    # rows of a matrix product change by rounding with the number of rows
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] == pytest.approx(found[2], rel=1e-4)


def test_success_reward_and_length_are_of_whole_episodes_counted_by_hand(tmp_path: Path) -> None:
    (tmp_path / "leaning.py").write_text(
        "import torch\ndef left(obs):\n    return torch.full((len(obs['policy']), 1), -1.0)\n"
    )
    sys.modules.pop("leaning", None)
    assert main(["play", "cartpole", "--num-envs", "3", "--num-steps", "60", "--policy", "leaning:left",
                 "--output", "p"]) == 0  # fmt: skip
    bundle = play_bundle("p")
    env = headrace.make("cartpole", 3, seed=0, threads=1)
    env.reset(seed=0)
    running, rewards, lengths = [0.0] * 3, [], []
    steps = [0] * 3
    for _ in range(60):
        _, reward, terminated, truncated, _ = env.step(torch.full((3, 1), -1.0))
        for slot in range(3):
            running[slot] += float(reward[slot])
            steps[slot] += 1
            if terminated[slot] or truncated[slot]:
                rewards.append(running[slot])
                lengths.append(steps[slot])
                running[slot], steps[slot] = 0.0, 0
    assert bundle.reward is not None
    assert bundle.ep_length is not None
    assert bundle.reward.samples == pytest.approx(rewards, rel=1e-5)  # float32 rewards against float64 sums
    assert bundle.ep_length.samples == [float(length) for length in lengths]
    assert bundle.success_rate is not None
    assert bundle.success_rate.successes == 0
    assert bundle.runtime.episodes is not None
    assert bundle.runtime.episodes.unfinished == sum(count > 0 for count in steps)


def test_too_few_steps_are_said_and_nothing_unfinished_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert played("--num-steps", "10", "--output", "p") == 0
    told = said(capsys)
    assert "4 episodes were still running after 10 steps and are counted nowhere" in told
    bundle = play_bundle("p")
    assert bundle.reward is None
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
        trust = ["--trust-checkpoint"] if name == "policy.pt" else []
        assert played("--policy", name, "--output", name.replace(":", "-") + "-out", *trust) == 0
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
    assert played("--policy", "2.onnx", "--output", "a") == 2
    assert "one input" in said(capsys)
    assert played("--policy", "cut.onnx", "--output", "b") == 2
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
    for name, how in (("mean", "--warmup-steps=0"), ("one", "--stochastic"), ("two", "--stochastic")):
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
    assert bundle.per_episode is not None
    assert bundle.per_episode.episode_ids == list(range(episodes))
    assert bundle.runtime.frames == episodes * 7  # nothing was stepped that nobody counts
    assert bundle.plan is not None
    assert (bundle.plan.kind, bundle.plan.episodes_planned) == ("episodes", episodes)
    assert bundle.runtime.episodes is not None
    assert bundle.runtime.episodes.unfinished == 0


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
        assert played("--policy", "pushing:push", "--output", "p") == 128 + signal.SIGTERM
        run = play_bundle("p").run
        assert (run.status, run.status_reason) == ("interrupted", "SIGTERM")
    else:
        words = ["evaluate", "cartpole", "--policy", "pushing:push", "--horizon", "1", "--threads", "1"]
        assert main([*words, "--episodes", "4"]) == 128 + signal.SIGTERM
