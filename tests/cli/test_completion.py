"""Completion, asked of a real bash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import main

_ASK = """
{script}
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_shtab_headrace
echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that adds a task by an entry point."""
    info = tmp_path / "adds_task-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: adds-task\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace.tasks]\ninstalled-task = adds_task:TASK\n")
    monkeypatch.syspath_prepend(str(tmp_path))


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
        ("headrace record exp", ["export"]),
        ("headrace record export a b --to le", ["lerobot"]),
    ],
)
def test_bash_completes_commands_tasks_options_and_their_values(
    capsys: pytest.CaptureFixture[str], words: str, expected: list[str]
) -> None:
    found = completed(capsys, words)
    assert set(expected) <= set(found)
    assert all(word.startswith(words.split()[-1]) for word in found)


def test_zsh_has_a_script_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef headrace")


def test_completion_and_the_list_of_commands_do_not_import_torch() -> None:
    code = (
        "import contextlib, io, sys; from headrace.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        "print('torch' in sys.modules)"
    )
    for words in (["completion", "bash"], ["--help"], ["train", "--help"]):
        run = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == "False", words


@pytest.mark.system
def test_a_real_zsh_takes_the_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "zsh"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    ask = 'autoload -Uz compinit && compinit -u -d dump; eval "$(<script)"; print -r -- "$_comps[headrace]"'
    answer = subprocess.run(["zsh", "-fc", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "_headrace" in answer.stdout
    assert answer.stderr == ""
