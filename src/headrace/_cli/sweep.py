"""``headrace sweep``: run two or more variants interleaved, and compare them."""

from __future__ import annotations

import argparse

from headrace._cli.compare import add_rule_options, show
from headrace._cli.options import add_options, arguments_of
from headrace._cli.printing import progress_bar, say
from headrace._jobs.comparing import COMMANDS, sweep
from headrace.errors import ConfigError

HELP = "run variants interleaved, with paired seeds, and compare them"
DESCRIPTION = (
    "Run a benchmark command several times for each of two or more variants, taking turns, then compare every "
    "variant with the first; seeds count up from --seed. Variants: --commits A B (git commits of the project you "
    "are in), or --vary OPTION=VALUE,VALUE,… for any option of the command, for example --vary num-envs=64,256, "
    "--vary set=decimation=2,set=decimation=4, --vary library=rsl_rl,skrl. Exit code 1 if anything regressed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage = "headrace sweep [options] {runtime,startup,train,play} TASK [options of that command]"
    variants = parser.add_mutually_exclusive_group(required=True)
    variants.add_argument("--commits", nargs=2, metavar=("A", "B"), help="two commits, tags or branches")
    variants.add_argument("--vary", metavar="OPTION=V1,V2", help="an option of the command and its values")
    add_options(parser, sweep, "repeats", "seed", "output")
    add_rule_options(parser)
    parser.add_argument("benchmark", choices=COMMANDS, help="the benchmark to run")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="TASK …", help="its task and options")


def handle(arguments: argparse.Namespace) -> int:
    """Run, compare and print."""
    settings = arguments_of(arguments, sweep)
    settings["vary"] = None if arguments.vary is None else _varied(arguments.vary)
    with progress_bar("runs", None) as update:
        result = sweep((arguments.benchmark, *arguments.rest), **settings, progress=update)
    for outcome in result.outcomes:
        if outcome.code:
            words = f"run {outcome.turn.repetition} of {outcome.turn.side.label} failed: {outcome.message}"
            say(words, "yellow", stderr=True)
    codes = [show(comparison, arguments) for comparison in result.comparisons]
    say(f"bundles are in {result.directory}")
    return max(codes)


def _varied(text: str) -> dict[str, list[object]]:
    option, equals, values = text.partition("=")
    if not equals or not option or len(values.split(",")) < 2:
        raise ConfigError(f"--vary: expected OPTION=VALUE,VALUE, got {text!r}; for example num-envs=64,256")
    option = option.removeprefix("--")
    return {option: [value.removeprefix(f"{option}=") for value in values.split(",")]}
