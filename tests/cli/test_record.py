from __future__ import annotations

import argparse

import pytest
import torch

from headrace._cli import record
from headrace.envs import make
from headrace.errors import ConfigError, IdError
from headrace.recording import DatasetInfo, EpisodeRecorder, RecorderCfg


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser(prog="headrace")
    record.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["record", *map(str, arguments)])
    return parsed.handler(parsed)


@pytest.fixture(scope="module")
def ants(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "ants"
    info = DatasetInfo(env_name="ant", env_args={"overrides": {"episode_length": 8}}, fps=20)
    env = make("ant", 2, threads=1, overrides={"episode_length": 8})
    with EpisodeRecorder(path, RecorderCfg(fields=("obs", "actions", "rewards", "flags", "states")), info) as recorder:
        env.attach(recorder)
        env.reset(seed=4)
        for step in range(24):
            env.step(torch.full((2, 8), 0.01 * step))
    env.close()
    return path


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
    with EpisodeRecorder(tmp_path / "empty", RecorderCfg(fields=("obs",)), DatasetInfo(env_name="ant", fps=20)):
        pass
    assert run("show", tmp_path / "empty") == 0
    out = capsys.readouterr().out
    assert "0 in all" in out
    assert "nan" not in out


def test_show_prints_episodes_and_fields(ants, capsys):
    assert run("show", ants, "--limit", 2) == 0
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


def test_a_contact_sheet_needs_pictures(ants, tmp_path):
    with pytest.raises(ConfigError, match="expected pictures in the dataset"):
        run("show", ants, "--sheet", tmp_path / "sheet.png")
