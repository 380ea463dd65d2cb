"""``headrace sweep``: run two or more variants interleaved, and compare them."""

from __future__ import annotations

import argparse
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from headrace._cli.bench_options import progress_bar
from headrace._cli.compare import add_rule_options, compared, rule_of, shown
from headrace._cli.options import add_option
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench._sweep import Outcome, Side, Sweep

_COMMANDS = ("runtime", "startup", "train", "play")


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
    parser.add_argument("command", choices=_COMMANDS, help="the benchmark to run")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="TASK …", help="its task and options")
    parser.set_defaults(handler=_sweep)


def _sweep(arguments: argparse.Namespace) -> int:
    from headrace.bench._sweep import Sweep, run_sweep
    from headrace.files import check_writable

    if not arguments.rest:
        raise ConfigError(f"sweep: expected a task after {arguments.command!r}, got none")
    for option in ("--seed", "--output"):
        if any(word == option or word.startswith(f"{option}=") for word in arguments.rest):
            raise ConfigError(f"sweep: expected {option} before {arguments.command!r}: the sweep sets it for each run")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    output: Path = arguments.output or Path("sweeps") / stamp
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output: expected an empty or new folder, got {str(output)!r}, which has files")
    rule = rule_of(arguments, _differing(arguments))
    with _sides(arguments) as sides:
        sweep = Sweep(
            sweep_id=f"sweep-{stamp}",
            command=(arguments.command, *arguments.rest),
            sides=tuple(sides),
            repetitions=arguments.repeats,
            seed=arguments.seed,
            output=output,
            rehearse=arguments.commits is not None,
        )
        check_writable(output)
        with progress_bar(f"{len(sides)} × {arguments.repeats} runs", len(sweep.turns())) as update:
            outcomes = run_sweep(sweep, update)
    _tell_failures(outcomes)
    codes: list[int] = []
    first, *others = sweep.sides
    for side in others:
        comparisons, notes = compared(_files(sweep, first), _files(sweep, side), rule)
        codes.append(shown(comparisons, notes, arguments, (first.label, side.label)))
    Console().print(Text(f"bundles are in {output}"), soft_wrap=True)
    return max(codes)


@contextmanager
def _sides(arguments: argparse.Namespace) -> Generator[Sequence[Side]]:
    from headrace.bench._sweep import Side, checkouts

    if arguments.commits is not None:
        with checkouts(arguments.commits, Path.cwd()) as sides:
            yield sides
        return
    option, equals, values = arguments.vary.partition("=")
    if not equals or not option or len(values.split(",")) < 2:
        raise ConfigError(f"--vary: expected OPTION=VALUE,VALUE, got {arguments.vary!r}; for example num-envs=64,256")
    option = option.removeprefix("--")
    sides: list[Side] = []
    for value in values.split(","):
        value = value.removeprefix(f"{option}=")
        sides.append(Side(label=f"{option}={value}", arguments=(f"--{option}", value)))
    yield sides


def _differing(arguments: argparse.Namespace) -> tuple[str, ...]:
    """What the variants differ in on purpose."""
    if arguments.commits is not None:
        return ()
    return ("settings", "library") if arguments.vary.startswith("library") else ("settings", "timing")


def _files(sweep: Sweep, side: Side) -> list[Path]:
    from headrace.bench import bundle_paths

    return bundle_paths(sweep.output / side.folder)


def _tell_failures(outcomes: Sequence[Outcome]) -> None:
    console = Console(stderr=True)
    for outcome in outcomes:
        if outcome.code:
            told = f"run {outcome.turn.repetition} of {outcome.turn.side.label} failed: {outcome.message}"
            console.print(Text(told, style="yellow"), soft_wrap=True)
