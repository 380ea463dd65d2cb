"""headrace steps batches of simulated robots and computes only what will be read.

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
headrace record pusher-solid --expert -o F  record episodes of an expert, or of a policy
headrace record info DATASET            what a recorded dataset holds; also verify, replay, merge, export
headrace runtime ant --output runs/a    measure it; 'headrace startup' profiles what comes before
headrace compare runs/a runs/b          improved, regressed, unchanged or inconclusive; 'sweep' makes the runs
headrace report runs                    all of it on one page
headrace demo                           the whole story in a few minutes
headrace new my-robot --from robot.xml  a package of your own around a robot model
headrace doctor                         what is installed, what is missing
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NoReturn, cast

from rich.console import Console
from rich.text import Text

from headrace import __version__
from headrace._interrupts import exit_code, interruptible, signal_name
from headrace.cli.records import Command, add_options, build
from headrace.errors import HeadraceError, nearest

COMMANDS = {
    "tasks": ("tasks", "list the tasks with their spaces and success measures"),
    "run": ("measured", "step a task and see its rates"),
    "view": ("viewing", "watch a task live in a browser"),
    "picture": ("viewing", "draw what a camera of a task sees: rgb, gray, depth, segmentation, normals"),
    "train": ("measured", "train a policy with an RL library, or with our own learner"),
    "play": ("measured", "play a trained policy and measure what it achieves"),
    "evaluate": ("evaluate", "play episodes with a policy that plans chunks of actions"),
    "merge": ("evaluate", "put evaluations that were played apart into one table"),
    "serve": ("serve", "serve a policy that plans chunks of actions to clients elsewhere"),
    "imitate": ("imitate", "train a chunk policy on an expert's demonstrations, or on a recorded dataset"),
    "record": ("record", "record episodes; info, verify, replay, merge and export them"),
    "runtime": ("measured", "measure how fast an environment steps, as a bundle"),
    "startup": ("measured", "profile what happens before the first step, as a bundle"),
    "compare": ("comparing", "show which metrics of two sets of runs improved or regressed"),
    "sweep": ("comparing", "run variants interleaved, with paired seeds, and compare them"),
    "report": ("comparing", "put runs on one HTML page: table, plots, verdicts"),
    "new": ("tasks", "write a package with a task around a robot model of yours"),
    "libero": ("libero", "export LIBERO's tasks so that they are played without LIBERO"),
    "demo": ("demo", "the whole story in a few minutes"),
    "doctor": ("doctor", "what is installed, what is missing, and the command that mends it"),
}
"""The commands in the order of the help: the module of each, and its line in the help."""


_RECORDED = ("episodes", "export", "info", "merge", "replay", "verify")
"""The commands of ``headrace record``; another word is a task to record."""


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors say what was meant. Sub-parsers are of the same class."""

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads for other namespaces, which are not used here
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; a word that nothing takes is an error of the command it was given to, which shows its own usage."""
        words = sys.argv[1:] if args is None else list(args)
        options = {word.partition("=")[0] for word in words[1:]}
        of_episodes = not options.isdisjoint(("-o", "--output", "--expert", "--policy"))
        if self.prog == "headrace record" and of_episodes and words[0] not in _RECORDED:
            words.insert(0, "episodes")  # a task
        parsed, unknown = super().parse_known_args(words, argparse.Namespace() if namespace is None else namespace)
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

    def name_option(self, message: str) -> str:
        """Write the argument that a message begins with as its option: ``horizon: …`` as ``--horizon: …``."""
        argument, colon, rest = message.partition(": ")
        option = f"--{argument.replace('_', '-')}"
        return f"{option}{colon}{rest}" if any(option in action.option_strings for action in self._actions) else message

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        options = [option for action in self._actions for option in action.option_strings]
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            self.error(f"expected no further argument, got {' '.join(unknown)!r}")
        setting = word.lstrip("-").replace("-", "_")
        if "--ppo" in options and setting in _ppo_settings():
            self.error(f"unknown option {word}; did you mean --ppo {setting}=…?")
        near = difflib.get_close_matches(word, options, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"see {self.prog} --help"
        self.error(f"unknown option {word}; {hint}")


def _ppo_settings() -> set[str]:
    from headrace.learning import PPOCfg

    return {field.name for field in fields(PPOCfg)}


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of every command with its options, of one of them, or, for ``""``, of their names alone."""
    parser = Parser(prog="headrace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    parser.set_defaults(handler=_show_help(parser), parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (place, text) in COMMANDS.items():
        if only is None or name == only:
            module = importlib.import_module(f"headrace.cli.{place}")
            if name in module.COMMANDS:
                _add_command(commands, name, text, module.COMMANDS[name])
                continue
            group = commands.add_parser(
                name, help=text, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
            )
            group.set_defaults(handler=_show_help(group))
            below = group.add_subparsers(title="commands", metavar="COMMAND")
            for inner, command in module.COMMANDS.items():
                _add_command(below, inner, str(command.record.__doc__).partition(". ")[0], command)
        else:
            commands.add_parser(name, help=text)
    return parser


def _add_command(
    commands: argparse._SubParsersAction[Parser],  # pyright: ignore[reportPrivateUsage]  # argparse has no public name
    name: str,
    text: str,
    command: Command,
) -> None:
    parser = commands.add_parser(name, help=text, description=" ".join((command.record.__doc__ or "").split()))
    add_options(parser, command.record)

    def handle(parsed: argparse.Namespace) -> int:
        return command.handle(build(command.record, parsed))

    parser.set_defaults(handler=handle, parser=parser)


def _show_help(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Return the handler of a command that needs another word after it and got none."""

    def show(parsed: argparse.Namespace) -> int:
        del parsed
        parser.print_help()
        return 2

    return show


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
    parser = build_parser(words[0] if words else "")
    parsed = parser.parse_args(words)
    handler = cast("Callable[[argparse.Namespace], int]", parsed.handler)
    try:
        with interruptible(), _plain_warnings():
            return handler(parsed)
    except HeadraceError as error:
        # a message may have brackets of its own, such as headrace[warp]
        message = Text.assemble(("error: ", "bold red"), cast("Parser", parsed.parser).name_option(str(error)))
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt as error:
        Console(stderr=True).print(f"interrupted by {signal_name(error)}")
        return exit_code(error)
