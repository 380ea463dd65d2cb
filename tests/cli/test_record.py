from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from headrace.cli.main import build_parser, main
from headrace.envs.registry import make
from headrace.errors import ConfigError, IdError
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg


def run(*arguments: object) -> int:
    parser = build_parser("record")
    parsed = parser.parse_args(["record", *map(str, arguments)])
    return parsed.handler(parsed)


@pytest.fixture(scope="module")
def ants(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "ants"
    info = DatasetInfo(recipe={"source": "ant", "overrides": {"episode_length": 8}}, fps=20)
    env = make("ant", 2, threads=1, overrides={"episode_length": 8})
    with EpisodeRecorder(path, RecorderCfg(fields=("obs", "actions", "rewards", "flags", "states")), info) as recorder:
        env.attach(recorder)
        env.reset(seed=4)
        for step in range(24):
            env.step(torch.full((2, 8), 0.01 * step))
    env.close()
    return path


def test_a_task_is_recorded_with_its_expert_or_a_policy(tmp_path, capsys) -> None:
    few = ("--episodes", "3", "--num-envs", "2", "--threads", "1")
    assert main(["record", "pusher-solid", "--expert", *few, "-o", str(tmp_path / "expert")]) == 0
    assert f"wrote {tmp_path / 'expert'}: 3 episodes" in capsys.readouterr().out
    assert [episode.meta.episode_id for episode in EpisodeDataset(tmp_path / "expert")] == [0, 1, 2]
    assert main(["record", "pusher-solid", *few, "--only", "succeeded", "-o", str(tmp_path / "policy")]) == 0
    assert run("replay", tmp_path / "policy") == 0
    assert "bit-exact" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="expected one of them, got both"):
        run("episodes", "pusher-solid", "--expert", "--policy", "latest", "-o", tmp_path / "no")
    with pytest.raises(ConfigError, match="record"):
        run("episodes", "pusher-solid", "--expert", *few, "-o", tmp_path / "expert")  # nothing is overwritten


def test_export_writes_each_format_and_verify_is_content(ants, tmp_path, capsys):
    for target, to in (("demos.hdf5", "robomimic"), ("ants", "lerobot"), ("ants-v0", "minari")):
        assert run("export", ants, tmp_path / target, "--to", to) == 0
        assert target in capsys.readouterr().out
        assert run("verify", tmp_path / target) == 0
        assert f"{to}: 6 episodes, 48 steps: all is well" in capsys.readouterr().out
    assert run("verify", ants) == 0
    assert "headrace: 6 episodes" in capsys.readouterr().out


def test_verify_names_a_damaged_file_and_fails(ants, tmp_path, capsys):
    import shutil

    shutil.copytree(ants, tmp_path / "copy")
    (tmp_path / "copy" / "episodes" / "seed4_ep00000001.npz").write_bytes(b"")
    assert run("verify", tmp_path / "copy") == 1
    out = capsys.readouterr().out
    assert "seed4_ep00000001.npz" in out
    assert "1 problem" in out


def test_show_of_a_dataset_without_episodes_has_no_mean(tmp_path, capsys):
    with EpisodeRecorder(
        tmp_path / "empty", RecorderCfg(fields=("obs",)), DatasetInfo(recipe={"source": "ant"}, fps=20)
    ):
        pass
    assert run("info", tmp_path / "empty") == 0
    out = capsys.readouterr().out
    assert "0 in all" in out
    assert "nan" not in out


def test_show_prints_episodes_and_fields(ants, capsys):
    assert run("info", ants, "--limit", 2) == 0
    out = capsys.readouterr().out
    assert "4 more" in out
    assert "obs/policy" in out
    assert "6 in all" in out


def test_replay_is_bit_exact_for_all_episodes_and_for_one(ants, capsys):
    assert run("replay", ants) == 0
    assert "bit-exact: 6 episodes, 48 steps" in capsys.readouterr().out
    assert run("replay", ants, "--episode", 3) == 0
    assert "bit-exact: 1 episodes, 8 steps" in capsys.readouterr().out
    with pytest.raises(IdError, match="not in the dataset"):
        run("replay", ants, "--episode", 99)


def test_replay_of_another_task_setting_says_where_it_differs(ants, tmp_path, capsys):
    import shutil

    shutil.copytree(ants, tmp_path / "copy")
    file = tmp_path / "copy" / "dataset.json"
    file.write_text(file.read_text().replace('"episode_length": 8', '"reset_noise": 0.2'))
    assert run("replay", tmp_path / "copy", "--episode", 0) == 1
    assert "at the beginning: recorded" in capsys.readouterr().out


def test_merge_makes_one_dataset_and_info_says_where_it_comes_from(ants, tmp_path, capsys):
    info = DatasetInfo(recipe={"source": "ant", "overrides": {"episode_length": 8}}, fps=20)
    env = make("ant", 2, threads=1, overrides={"episode_length": 8})
    fields = ("obs", "actions", "rewards", "flags", "states")
    with EpisodeRecorder(tmp_path / "more", RecorderCfg(fields=fields), info) as recorder:
        env.attach(recorder)
        env.reset(seed=5)
        for _ in range(8):
            env.step(torch.zeros(2, 8))
    env.close()
    assert run("merge", ants, tmp_path / "more", "-o", tmp_path / "both") == 0
    assert "8 episodes of 2 datasets" in capsys.readouterr().out
    assert run("info", tmp_path / "both") == 0
    said = capsys.readouterr().out
    assert "recipe: {'source': 'ant'" in said
    assert "fps: 20" in said
    assert run("replay", tmp_path / "both") == 0
    assert "bit-exact: 8 episodes" in capsys.readouterr().out
    assert run("export", tmp_path / "both", tmp_path / "x", "--to", "lerobot") == 0
    assert run("verify", tmp_path / "x") == 0
    assert "lerobot: 8 episodes" in capsys.readouterr().out


OWN_TASK = """
from headrace import TaskEntry, register_task
register_task(TaskEntry(
    name="own-pole",
    task="headrace.envs.tasks.cartpole:Cartpole",
    cfg="headrace.envs.tasks.cartpole:CartpoleCfg",
    summary="a task of the user's own",
))
"""


def test_a_task_of_ones_own_is_replayed_by_its_module(tmp_path, capsys, monkeypatch):
    (tmp_path / "own_tasks.py").write_text(OWN_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    import own_tasks  # noqa: F401  (registers the task)

    env = make("own-pole", 2, overrides={"episode_length": 5})
    with EpisodeRecorder(tmp_path / "d", RecorderCfg(fields=("obs", "actions")), DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        env.reset(seed=4)
        for _ in range(5):
            env.step(torch.zeros(2, 1))
    env.close()
    program = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "record", "replay", str(tmp_path / "d")]
    plain = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert plain.returncode == 2
    assert "own-pole" in plain.stderr
    named = subprocess.run(
        [*command, "--task", "own_tasks:own-pole"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert named.returncode == 0, named.stderr
    assert "bit-exact" in named.stdout


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--camera-name", "front"), "--camera-name: expected path=value"),
        (("--camera-name", "obs/policy=1e3"), "--camera-name obs/policy: expected a name, got 1000.0"),
        (("--stack", "obs/policy=many"), "number of frames"),
        (("--camera-name", "obs/nothing=front"), "obs/nothing"),
    ],
)
def test_options_that_make_no_sense_are_refused(ants, tmp_path, option, words):
    with pytest.raises(ConfigError, match=words):
        run("export", ants, tmp_path / "x", "--to", "lerobot", *option)
