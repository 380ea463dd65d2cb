"""A play records what acted: an edit of the policy's code, tracked or not, gives another id."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.policies import step_policy as identity


def test_a_policy_in_an_untracked_file_is_recorded_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    subprocess.run(["git", "init", "-q"], check=True)
    author = ["-c", "user.name=T", "-c", "user.email=t@example.com"]
    subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "begin"], check=True)
    ids: list[str | None] = []
    for number, sign in enumerate("+-"):
        (tmp_path / "acting.py").write_text(f"def good(obs):\n    return {sign}0.1 * obs['policy'][:, :1]\n")
        sys.modules.pop("acting", None)
        identity._file_hash.cache_clear()  # a process reads a file once; the second play stands for another process
        result = headrace.play(
            "cartpole",
            policy="acting:good",
            episodes=2,
            num_envs=2,
            warmup_steps=0,
            run=headrace.RunCfg(output=Path(f"run{number}")),
            overrides={"episode_length": 4},
        )
        ids.append(result.bundle.policy.policy_id)
        versions = result.bundle.versions
        assert versions.git_dirty is True
        assert versions.git_dirty_files is not None
        assert "acting.py" in versions.git_dirty_files
    assert None not in ids
    assert ids[0] != ids[1]
