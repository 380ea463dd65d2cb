"""``headrace sweep``: run two or more variants interleaved, and compare them."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.text import Text

from headrace._cli.bench_options import progress_bar
from headrace._cli.compare import add_rule_options, rule_of, show
from headrace._cli.options import add_option, values
from headrace.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "sweep",
        help="run variants interleaved, with paired seeds, and compare them",
        usage="headrace sweep [options] {runtime,startup,train,play} TASK [options of that command]",
        description=(
            "Run a benchmark command several times for each of two or more variants, taking turns, then compare every "
            "variant with the first. Variants: --commits A B (git commits of the project you are in), or --vary "
            "OPTION=VALUE,VALUE,… for any option of the command, for example --vary num-envs=64,256, "
            "--vary set=decimation=2,set=decimation=4, --vary library=rsl_rl,skrl. Exit code 1 if anything regressed."
        ),
    )
    variants = parser.add_mutually_exclusive_group(required=True)
    variants.add_argument("--commits", nargs=2, metavar=("A", "B"), help="two commits, tags or branches")
    variants.add_argument("--vary", metavar="OPTION=V1,V2", help="an option of the command and its values")
    parser.add_argument("--repeats", type=int, default=10, help="runs of each variant (default: 10)")
    add_option(parser, "--seed", default=0, otherwise="0 for the first repetition, then counting up")
    add_option(parser, "--output", otherwise="sweeps/<time>")
    add_rule_options(parser)
    parser.add_argument("command", choices=("runtime", "startup", "train", "play"), help="the benchmark to run")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="TASK …", help="its task and options")
    parser.set_defaults(handler=_sweep)


def _sweep(arguments: argparse.Namespace) -> int:
    from headrace._jobs.comparing import sweep

    with progress_bar("runs", 0) as update:
        result = sweep(
            (arguments.command, *arguments.rest),
            vary=None if arguments.vary is None else _varied(arguments.vary),
            commits=None if arguments.commits is None else tuple(arguments.commits),
            **values(arguments, "repeats", "seed", "output"),
            progress=lambda done, _: update(done),
            **rule_of(arguments),
        )
    console = Console(stderr=True)
    for outcome in result.outcomes:
        if outcome.code:
            words = f"run {outcome.turn.repetition} of {outcome.turn.side.label} failed: {outcome.message}"
            console.print(Text(words, style="yellow"), soft_wrap=True)
    codes = [show(comparison, arguments) for comparison in result.comparisons]
    Console().print(Text(f"bundles are in {result.directory}"), soft_wrap=True)
    return max(codes)


def _varied(text: str) -> dict[str, list[object]]:
    option, equals, values = text.partition("=")
    if not equals or not option or len(values.split(",")) < 2:
        raise ConfigError(f"--vary: expected OPTION=VALUE,VALUE, got {text!r}; for example num-envs=64,256")
    option = option.removeprefix("--")
    return {option: [value.removeprefix(f"{option}=") for value in values.split(",")]}
