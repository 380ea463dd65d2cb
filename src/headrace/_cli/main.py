"""The root of the command: one module per sub-command, each a :class:`Command`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, cast

from rich.console import Console
from rich.text import Text

from headrace import __version__
from headrace._cli.printing import compile_notice
from headrace._interrupts import exit_code, interruptible, signal_name
from headrace.errors import HeadraceError, nearest


class Command(Protocol):
    """What the module of a sub-command has."""

    HELP: str
    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add arguments and options."""
        ...

    def handle(self, arguments: argparse.Namespace) -> int:
        """Do it; returns the exit code."""
        ...


COMMANDS = (
    *("tasks", "run", "view", "picture", "train", "play", "evaluate", "merge", "serve", "imitate", "record"),
    *("runtime", "startup", "compare", "sweep", "report"),
    *("demo", "doctor", "completion"),
)
"""The names of the commands, each of the module that adds it, in the order of the help."""

_DESCRIPTION = """\
headrace steps batches of simulated robots and computes nothing that nobody will read.

  headrace tasks                          what there is to simulate
  headrace run ant --num-envs 256         step it and see how fast it is
  headrace run ant --suspend-fraction 0.5 half of the environments frozen, half of the cost
  headrace view ant                       watch it live in a browser
  headrace picture ant --kind depth -o F  what a camera sees: rgb, depth, segmentation, normals
  headrace train ant --library rsl_rl     train a policy with an RL library, or with our own learner
  headrace play cartpole                  what the newest, or the published, checkpoint achieves
  headrace evaluate pusher-solid          play episodes with the chunk policy that we ship
  headrace merge A.jsonl B.jsonl          parts of an evaluation that were played apart, as one table
  headrace serve pusher-solid             serve a chunk policy to clients elsewhere, batching over them
  headrace imitate pusher-solid --output F  record an expert and train such a policy
  headrace record info DATASET            what a recorded dataset holds; also verify, replay, merge, export
  headrace runtime ant --output runs/a    measure it; 'headrace startup' profiles what comes before
  headrace compare runs/a runs/b          improved, regressed, unchanged or inconclusive; 'sweep' makes the runs
  headrace report runs                    all of it on one page
  headrace demo                           the whole story in a few minutes
  headrace doctor                         what is installed, what is missing
"""


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


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Every command with its options, or one of them; nothing heavy is imported for it."""
    parser = Parser(prog="headrace", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    parser.set_defaults(handler=helping(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS if only is None else (only,):
        module = cast("Command", importlib.import_module(f"headrace._cli.{name}"))
        command = commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION)
        # one that has only commands of its own shows its help
        command.set_defaults(handler=getattr(module, "handle", helping(command)))
        module.add_arguments(command)
    return parser


def _warning(message: Warning | str, *_: object, **__: object) -> str:
    return f"warning: {message}\n"


@contextmanager
def _plain_warnings() -> Generator[None]:
    """Print a warning as its text, without the line of source that gave it."""
    usual = warnings.formatwarning
    warnings.formatwarning = _warning
    try:
        yield
    finally:
        warnings.formatwarning = usual


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for a failure, 2 for a request that cannot be met."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    # a command is parsed by its own module alone: the others need not be imported
    alone = words[0] if words and words[0] in COMMANDS else None
    parsed = build_parser(alone).parse_args(words)
    handler = cast("Callable[[argparse.Namespace], int]", parsed.handler)
    try:
        with interruptible(), compile_notice(), _plain_warnings():
            return handler(parsed)
    except HeadraceError as error:
        # a message may have brackets of its own, such as headrace[warp]
        message = Text.assemble(("error: ", "bold red"), str(error))
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt as error:
        Console(stderr=True).print(f"interrupted by {signal_name(error)}")
        return exit_code(error)
