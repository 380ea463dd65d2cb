"""Every ``headrace …`` command of README, guides and help is one that the program takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from headrace.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FILES += sorted(path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.*"))
FILES = [path for path in FILES if path.suffix in (".md", ".py", ".sh")]
BLOCK = re.compile(r"^```(?:sh|text|console|)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(headrace [a-z][^`…]*)`")


def _commands(path: Path) -> set[str]:
    text = path.read_text()
    blocks = [text] if path.suffix == ".sh" else BLOCK.findall(text)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    started = [line.removeprefix("$ ").removeprefix(".venv/bin/") for line in lines]
    inline = [command.replace("\n", " ") for command in INLINE.findall(text)]
    return {command for command in [*started, *inline] if command.startswith("headrace ")}


@pytest.mark.parametrize("path", [f for f in FILES if _commands(f)], ids=lambda f: str(f.relative_to(ROOT)))
def test_every_command_of_a_page_is_understood(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    known = parser._subparsers._group_actions[0].choices
    for command in sorted(_commands(path)):
        words = shlex.split(command, comments=True)[1:]
        assert words[0] in known, command
        if len(words) == 1 or not any(word.startswith("-") for word in words):
            continue  # a mention of a command, not a call of it
        try:
            parser.parse_args(words)
        except SystemExit as stop:
            pytest.fail(f"{command}: {capsys.readouterr().err}") if stop.code else None


def test_the_first_page_of_help_shows_commands_that_work() -> None:
    parser = build_parser()
    shown = [line.strip() for line in parser.description.splitlines() if line.strip().startswith("headrace ")]
    calls = [re.split(r"\s{2,}", line)[0] for line in shown if "steps batches" not in line]
    for call in calls:
        words = shlex.split(re.sub(r" half .*", "", call))[1:]
        assert parser.parse_args(words).handler
    assert len(calls) >= 8
