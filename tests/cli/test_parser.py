"""What the command line says to a word that it does not know."""

from __future__ import annotations

import pytest

from headrace.cli import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("runn", "headrace: error: unknown command 'runn'; did you mean 'run'?"),
        ("zzz", "headrace: error: unknown command 'zzz'; choose from tasks, run, view, "),
        ("record expor", "headrace record: error: unknown command 'expor'; did you mean 'export'?"),
        ("run ant --nmu-envs 3", "headrace run: error: unknown option --nmu-envs; did you mean --num-envs?"),
        ("run ant --nmu-envs=3", "headrace run: error: unknown option --nmu-envs; did you mean --num-envs?"),
        ("train ant --learning-rate 3e-4", "unknown option --learning-rate; did you mean --ppo learning_rate=…?"),
        ("run ant --qqq", "headrace run: error: unknown option --qqq; see headrace run --help"),
        ("run ant bee", "headrace run: error: expected no further argument, got 'bee'"),
        ("evaluate ant --engine thred", "argument --engine: unknown value 'thred'; did you mean 'thread'?"),
        ("--verson", "headrace: error: unknown option --verson; did you mean --version?"),
    ],
)
def test_an_unknown_word_is_answered_with_the_nearest_known_one(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


@pytest.mark.parametrize(("words", "line"), [([], "headrace demo "), (["record"], "headrace record verify ")])
def test_a_command_without_its_next_word_shows_its_help(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert line in capsys.readouterr().out


def test_tasks_fit_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["tasks"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert "observes critic 4, policy 48×48×6 uint8; acts with 1 " in " ".join(shown.split())
