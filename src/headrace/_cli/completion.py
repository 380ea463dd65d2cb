"""``headrace completion``: a script that makes the shell complete commands, options and tasks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from headrace._cli.options import TASK

_BASH = """\
_headrace() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case "$command" in
{cases}
    esac
    case "$command $before" in
{values}
    esac
  fi
  COMPREPLY=( $(compgen -W "$words" -- "$word") )
  if [ ${{#COMPREPLY[@]}} -eq 0 ]; then COMPREPLY=( $(compgen -f -- "$word") ); fi
}}
complete -F _headrace headrace
"""
_RULES = ("greedy", "immediate", "synchronized", "whole-batch-on-any")
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


HELP = "a script for your shell that completes commands, options and tasks"
DESCRIPTION = 'Print the script. For bash:  eval "$(headrace completion bash)"  in ~/.bashrc; zsh the same way.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument."""
    parser.add_argument("shell", choices=("bash", "zsh"))


def handle(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from headrace._cli.main import build_parser

    sys.stdout.write((_ZSH if arguments.shell == "zsh" else "") + _bash_script(build_parser()))
    return 0


def _bash_script(root: argparse.ArgumentParser) -> str:
    """The completion function for bash: words by command, values after an option, then file names.

    Tasks are those of this installation, with what other packages add by entry points.
    """
    from headrace.envs._registry import task_names

    cases: list[str] = []
    values: list[str] = []
    known = _known_values()
    (commands,) = [action.choices for action in root._actions if isinstance(action.choices, dict)]  # pyright: ignore[reportPrivateUsage]  # argparse does not show them otherwise
    for name, parser in commands.items():
        words: list[str] = []
        for action in parser._actions:  # pyright: ignore[reportPrivateUsage]  # as above
            words += action.option_strings
            if action.option_strings and (choices := [*map(str, action.choices or known.get(action.dest, ()))]):
                patterns = "|".join(f'"{name} {option}"' for option in action.option_strings)
                values.append(f'      {patterns}) words="{" ".join(choices)}" ;;')
            if not action.option_strings:
                words += map(str, action.choices or ())
            if action.metavar == TASK:
                words += task_names()
        cases.append(f'      {name}) words="{" ".join(words)}" ;;')
    return _BASH.format(commands=" ".join(commands), cases="\n".join(cases), values="\n".join(values))


def _known_values() -> dict[str, Sequence[str]]:
    """What the options take whose values are names, by the name of the option."""
    from headrace.adapters._library import library_names
    from headrace.bench._formatters import FORMATTERS
    from headrace.envs._recipe import SIMS
    from headrace.sim._camera import FRAME_KINDS
    from headrace.sim._camera_names import camera_names

    return {
        "library": library_names(),
        "formatters": sorted(FORMATTERS),
        "sim": SIMS,
        "renderer": camera_names(),
        "kind": list(FRAME_KINDS),
        "device": ("cpu", "cuda"),
        "admission": _RULES,
    }
