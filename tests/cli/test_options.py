"""One name, one help text and one kind of value per option, over all commands."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from headrace.cli.main import build_parser

DIFFERENT_ON_PURPOSE = {"--camera", "--policy"}
"""``run`` takes what acts on observations, ``evaluate`` and ``serve`` what plans chunks. ``train`` resumes the
directory of a run, ``evaluate`` the file that ``--journal`` names. ``picture`` looks through a camera of the model,
``record info`` at the recorded array of one."""
SYNONYMS = {
    "--num-envs": ("--envs", "--n-envs", "--number-of-envs"),
    "--num-steps": ("--steps", "--max-steps", "--total-steps"),
    "--episodes": ("--num-episodes", "--n-episodes"),
    "--output": ("--out", "--outdir", "--output-dir", "--folder", "--directory", "--to-file"),
    "--set": ("--override", "--overrides", "--option"),
    "--threads": ("--num-threads",),
    "--seed": ("--random-seed",),
    "--library": ("--lib", "--framework", "--rl-library"),
    "--video": ("--movie",),
}


def options() -> Iterator[tuple[str, argparse.Action]]:
    """Every option of every command, with the command."""

    def walk(parser: argparse.ArgumentParser, command: str) -> Iterator[tuple[str, argparse.Action]]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, below in action.choices.items():
                    yield from walk(below, f"{command} {name}".strip())
            elif action.option_strings:
                yield command, action

    return walk(build_parser(), "")


def idea(action: argparse.Action) -> str:
    """The help text without its default, which may differ between commands."""
    return re.sub(r" ?\(default: [^)]*\)", "", action.help or "")


def test_an_option_means_the_same_in_every_command() -> None:
    seen: dict[str, tuple[str, tuple[object, ...]]] = {}
    for command, action in options():
        for name in set(action.option_strings) - DIFFERENT_ON_PURPOSE:
            meaning = (idea(action), action.type, action.metavar, action.nargs, type(action))
            first, known = seen.setdefault(name, (command, meaning))
            assert meaning == known, f"{name}: {command!r} has {meaning}, {first!r} has {known}"
    assert len(seen) > 60


def test_no_idea_has_two_names() -> None:
    names = {name for _, action in options() for name in action.option_strings}
    for name, others in SYNONYMS.items():
        assert name in names
        assert not names & set(others), f"use {name} instead of {sorted(names & set(others))}"
    by_idea: dict[str, set[str]] = {}
    for _, action in options():
        by_idea.setdefault(idea(action), set()).add(action.option_strings[0])
    assert {text: found for text, found in by_idea.items() if len(found) > 1} == {}


def test_every_option_has_a_help_text_in_lower_case_without_a_period() -> None:
    for command, action in options():
        text = idea(action)
        assert text, f"{command} {action.option_strings}: no help text"
        assert not text.endswith("."), f"{command} {action.option_strings}: {text}"


@pytest.mark.parametrize("word", ["folder", "picture", "so many", "of whoever", "1 a chunk", "go on"])
def test_help_texts_use_the_words_of_the_style_guide(word: str) -> None:
    found = [
        f"{command} {action.option_strings}: {action.help}" for command, action in options() if word in str(action.help)
    ]
    assert found == []


def test_the_help_names_every_form_and_every_library_that_ships() -> None:
    # in a process of its own: other tests register forms
    code = (
        "from headrace.bench.figures import FORMATTERS; from headrace.bench.benchmark import RunCfg\n"
        "from headrace.cli.records import Shared, field_docs; from headrace.libraries.registry import BUILT_IN\n"
        "print(*[name for name in FORMATTERS if name not in field_docs(RunCfg)['formatters']])\n"
        "print(*[name for name in BUILT_IN if name not in field_docs(Shared)['library']])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize("name", ["--device", "--num-envs", "--seed", "--sim", "--threads"])
def test_the_default_of_what_a_recipe_file_says_is_the_recipes(name: str) -> None:
    told = {
        command: str(action.help)
        for command, action in options()
        if name in action.option_strings and command in ("evaluate", "play", "run", "runtime", "startup", "train")
    }
    assert told
    assert [command for command, text in told.items() if "recipe" not in text] == []
