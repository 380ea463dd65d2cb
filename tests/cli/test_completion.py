"""Completion, asked of a real bash."""

from __future__ import annotations

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
    ],
)
def test_bash_completes_commands_tasks_and_options(
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
