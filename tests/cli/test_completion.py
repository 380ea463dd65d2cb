"""Completion, asked of a real bash."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace._cli import main

_ASK = """
{script}
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_headrace
echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that adds a task by an entry point."""
    from headrace.envs import _registry as registry

    info = tmp_path / "adds_task-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: adds-task\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace.tasks]\ninstalled-task = adds_task:TASK\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_entry_points", functools.cache(registry._entry_points.__wrapped__))


def completed(capsys: pytest.CaptureFixture[str], words: str) -> list[str]:
    assert main(["completion", "bash"]) == 0
    ask = _ASK.format(script=capsys.readouterr().out, words=words)
    answer = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert answer.stderr == ""
    return answer.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("headrace ru", ["run"]),
        ("headrace run cartpole-d", ["cartpole-discrete"]),
        ("headrace run ant --num", ["--num-envs"]),
        ("headrace completion z", ["zsh"]),
        ("headrace train ant --library rs", ["rsl_rl"]),
        ("headrace evaluate ant --engine th", ["thread"]),
        ("headrace picture ant --kind se", ["segmentation"]),
        ("headrace run installed-", ["installed-task"]),
    ],
)
def test_bash_completes_commands_tasks_options_and_their_values(
    capsys: pytest.CaptureFixture[str], words: str, expected: list[str]
) -> None:
    found = completed(capsys, words)
    assert set(expected) <= set(found)
    assert all(word.startswith(words.split()[-1]) for word in found)


def test_zsh_takes_the_same_script_through_its_own_door(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out


@pytest.mark.system
def test_a_real_zsh_takes_the_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "zsh"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    ask = 'autoload -Uz compinit && compinit -u -d dump; source ./script; print -r -- "$_comps[headrace]"'
    answer = subprocess.run(["zsh", "-fc", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "_headrace" in answer.stdout
    assert answer.stderr == ""
