"""The command line as its user sees it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.envs.registry import task_names
from headrace.errors import MissingExtraError


def test_tasks_lists_every_task_with_its_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in task_names())
    assert "2 choices" in shown


def test_tasks_lists_the_others_where_one_cannot_be_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import EntryPoint

    from headrace.envs import registry

    lost = EntryPoint("lost", "no_such_package:TASK", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "_entry_points", lambda: {"lost": lost})
    assert main(["tasks"]) == 0
    shown = capsys.readouterr().out
    assert "cannot be made here" in shown
    assert "pusher-solid" in shown


def test_run_prints_rates_and_how_episodes_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "cartpole", "--num-envs", "8", "--num-steps", "60"]) == 0
    shown = capsys.readouterr().out
    assert "env-steps per second" in shown
    assert "8 of 8 environments acting" in shown
    assert "success rate" in shown


def test_run_can_suspend_a_share_of_the_environments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "cartpole", "--num-envs", "8", "--num-steps", "5", "--suspend-fraction", "0.75"]) == 0
    assert "2 of 8 environments acting" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["zero", "random"])
def test_run_knows_discrete_actions(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "cartpole-discrete", "--num-envs", "3", "--num-steps", "4", "--policy", policy]) == 0
    assert "env-steps per second" in capsys.readouterr().out


def push_right(obs: dict[str, object]) -> object:
    import torch

    return torch.ones((4, 1))


def test_run_takes_a_policy_of_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    policy = f"{__name__}:push_right"
    assert main(["run", "cartpole", "--num-envs", "4", "--num-steps", "80", "--policy", policy]) == 0
    assert "0.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "antt"], "did you mean 'ant'"),
        (["run", "ant", "--num-envs", "0"], "--num-envs: expected at least 1, got 0"),
        (["run", "ant", "--num-steps", "0"], "(--num-steps): expected at least 1, got 0"),
        (["run", "ant", "--suspend-fraction", "2"], "expected a share from 0 to 1, got 2.0"),
        (["run", "ant", "--set", "ctrl_cost=1"], "did you mean 'ctrl_cost_weight'"),
        (["run", "ant", "--set", "decimation"], "expected path=value"),
        (["run", "ant", "--policy", "nowhere:nothing"], "cannot be imported"),
        (["run", "ant", "--policy", ":nothing"], "expected module:name"),
        (["run", "ant", "--policy", ".here:nothing"], "cannot be imported"),
        (["run", "ant", "--policy", "often"], "expected random, zero, module:function, latest"),
    ],
)
def test_a_request_that_cannot_be_met_says_what_to_write_instead(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_setting_given_on_the_command_line_reaches_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "cartpole", "--num-envs", "2", "--num-steps", "6", "--set", "episode_length=3"]) == 0
    assert "mean length" in capsys.readouterr().out


def test_run_records_episodes_that_verify_and_replay_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "dataset")
    assert main(["run", "cartpole", "--num-envs", "4", "--num-steps", "60", "--record", folder]) == 0
    assert "episodes recorded" in capsys.readouterr().out
    assert main(["record", "verify", folder]) == 0
    assert main(["record", "replay", folder]) == 0
    assert main(["run", "cartpole", "--num-envs", "4", "--num-steps", "5", "--record", folder]) == 2, (
        "never overwritten"
    )


def test_an_environment_prints_the_name_of_its_task() -> None:
    import headrace

    with closing(headrace.make("cartpole", 2)) as env:
        assert repr(env) == "BatchEnv('cartpole', num_envs=2)"
    with closing(headrace.bridge("CartPole-v1", 2)) as bridged:
        assert repr(bridged) == "BridgeEnv('gym:CartPole-v1', num_envs=2)"


def test_run_records_what_the_environment_says_about_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import headrace
    from headrace.recording import DatasetInfo, EpisodeDataset

    sizes = ["--num-envs", "2", "--num-steps", "4", "--set", "episode_length=3", "--set", "frame_stack=2"]
    assert main(["run", "cartpole-camera", *sizes, "--record", str(tmp_path / "d")]) == 0
    info = EpisodeDataset(tmp_path / "d").info
    env = headrace.make("cartpole-camera", 2, threads=1, overrides={"episode_length": 3, "frame_stack": 2})
    assert info == DatasetInfo.of(env)
    env.close()
    assert info.stacks
    assert info.spaces
    capsys.readouterr()
    assert main(["run", "cartpole-camera", *sizes, "--record", str(tmp_path / "d")]) == 2
    assert "directory" in capsys.readouterr().err


def test_the_name_of_an_extra_survives_in_an_error_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MissingExtraError("run: pip install 'headrace[warp]'")

    monkeypatch.setattr("headrace.EnvRecipe.make", refuse)
    assert main(["run", "cartpole"]) == 2
    assert capsys.readouterr().err.strip() == "error: run: pip install 'headrace[warp]'"


def test_a_policy_is_found_in_the_folder_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "policy_of_this_folder.py").write_text("import torch\ndef act(obs): return torch.ones(2, 1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    policy = "policy_of_this_folder:act"
    assert main(["run", "cartpole", "--num-envs", "2", "--num-steps", "2", "--policy", policy]) == 0
    assert "env-steps per second" in capsys.readouterr().out


def test_the_first_reset_is_not_counted_among_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "cartpole", "--num-envs", "2", "--num-steps", "2", "--suspend-fraction", "1"]) == 0
    assert "in reset" not in capsys.readouterr().out


def test_help_does_not_import_torch() -> None:
    code = (
        "import contextlib, io, sys; from headrace.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        "print('torch' in sys.modules)"
    )
    for words in (["--help"], ["train", "--help"]):
        run = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == "False", words


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shtab_makes_a_completion_of_the_parser(shell: str) -> None:
    command = [
        sys.executable,
        "-m",
        "shtab",
        f"--shell={shell}",
        "--prog",
        "headrace",
        "headrace.cli.main.build_parser",
    ]
    script = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--suspend-fraction" in script
