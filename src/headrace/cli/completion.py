"""``headrace completion``: a script that makes the shell complete commands, options and tasks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Literal

import shtab

from headrace._gymnasium_ids import IDS
from headrace.cli.records import Command, Positional
from headrace.envs.recipe import ENTRY_POINTS, SIMS


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Print the script. For bash: eval "$(headrace completion bash)" in ~/.bashrc; zsh the same way, in ~/.zshrc."""

    shell: Annotated[Literal["bash", "zsh"], Positional()]
    """The shell to print it for."""


def _completion(given: CompletionOptions) -> int:
    from headrace.bench.formatters import FORMATTERS
    from headrace.cli.main import build_parser
    from headrace.libraries.registry import library_names

    known = {  # of this installation, without importing torch
        "task": [*IDS.values(), *(point.name for point in entry_points(group=ENTRY_POINTS))],
        "--admission": ("greedy", "immediate", "synchronized", "whole-batch-on-any"),
        "--device": ("cpu", "cuda"),
        "--formatter": sorted(FORMATTERS),
        "--library": library_names(),
        "--renderer": ("native", "gl", "warp"),
        "--sim": SIMS,
    }
    parser = build_parser()
    for action in _walk(parser):
        action.choices = action.choices or known.get((*action.option_strings, action.dest)[0])
    sys.stdout.write(shtab.complete(parser, given.shell))
    return 0


def _walk(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its commands."""
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for them
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from _walk(below)
        else:
            yield action


COMMANDS = {"completion": Command(CompletionOptions, _completion)}
