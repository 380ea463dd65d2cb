"""The parser of every command: what it does not know, it answers with the nearest thing that it does."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from headrace.errors import nearest


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors say what was meant. Sub-parsers are of the same class."""

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads for other namespaces, which nobody here uses
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; a word that nothing takes is an error of the command it was given to, which shows its own usage."""
        parsed, unknown = super().parse_known_args(args, argparse.Namespace() if namespace is None else namespace)
        if unknown:
            self._refuse(unknown)
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is not among an argument's choices."""
        if action.choices is None or value in action.choices:
            return
        hint = nearest(str(value), [str(choice) for choice in action.choices])
        if isinstance(action.choices, Mapping):  # of names to the parsers of commands
            raise argparse.ArgumentError(None, f"unknown command {value!r}; {hint}")
        raise argparse.ArgumentError(action, f"unknown value {value!r}; {hint}")

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        options = [option for action in self._actions for option in action.option_strings]
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            self.error(f"expected no further argument, got {' '.join(unknown)!r}")
        near = difflib.get_close_matches(word, options, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"see {self.prog} --help"
        self.error(f"unknown option {word}; {hint}")


def helping(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """What a command does that needs another word after it and got none: show its help."""

    def show(arguments: argparse.Namespace) -> int:
        del arguments
        parser.print_help()
        return 2

    return show
