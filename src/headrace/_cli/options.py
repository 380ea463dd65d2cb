"""Options of commands, made of the jobs that they call: name, kind and default are those of an argument."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable
from typing import Any

from headrace._jobs.request import RunOptions
from headrace.adapters._library import BUILT_IN

FORMS = "schema, isaaclab, json, omniperf, osmo, summary, tensorboard, or module:function of your own"
TASK = "TASK"
_SOURCES = "a name from 'headrace tasks', module:NAME, gym:ID, or a recipe file (.yaml, .json)"
_FLAGS = {
    "ensemble_decay": "--ensemble",
    "formatters": "--formatter",
    "metrics": "--metric",
    "overrides": "--set",
    "presets": "--preset",
}
"""Arguments whose option is not called like them."""
_SHARED = {
    "device": ("", "device of the tensors: cpu, or cuda with --sim warp"),
    "episodes": ("N", "episodes to play, with ids from 0, each counted once"),
    "formatters": ("FORM", f"form of the result, repeatable: {FORMS} (default: schema, the bundle)"),
    "label": ("", "a name for this run in comparisons and reports"),
    "library": (
        "",
        f"RL library: {', '.join(BUILT_IN)} (headrace is our own small PPO), or one that an installed package adds",
    ),
    "num_envs": ("N", "environments in the batch"),
    "num_steps": ("N", "steps of the batch"),
    "output": ("PATH", "where to write the result"),
    "overrides": (
        "PATH=VALUE",
        "override a setting of the task, or an argument of a Gymnasium environment; repeatable",
    ),
    "presets": ("FILE.yaml", "file of task settings ('path: value' lines), applied before --set; repeatable"),
    "renderer": ("NAME", "what draws: native, gl (MuJoCo's own images) or warp"),
    "resume": ("", "continue what was cut short: do only what its journal or checkpoint lacks"),
    "seed": ("N", "seed of episodes and of everything else that is random"),
    "sim": ("SIM", "physics: mujoco or warp"),
    "threads": ("N", "physics threads"),
    "warmup_steps": ("N", "steps before measuring, at least; more until the step time is steady"),
    "video": ("FILE.mp4", "record a video of the first environments"),
}
"""Arguments that several jobs have: metavar and help text."""
_RUN_DEFAULTS = {
    "device": "the recipe's, else cpu",
    "num_envs": "the recipe's, else 64",
    "output": "runs/<run id>; never overwrites",
    "seed": "the recipe's, else 0",
    "sim": "the recipe's, else mujoco",
    "threads": "the recipe's, else all cores",
}
"""What :class:`headrace.RunOptions` leaves open, in words."""


def add_task(parser: argparse.ArgumentParser, *, more: str = "", optional: bool = False) -> None:
    """Add the argument that says what to make.

    Args:
        parser: of the command.
        more: further forms that this command takes, in words.
        optional: may be left out.
    """
    parser.add_argument("task", metavar=TASK, nargs="?" if optional else None, help=_SOURCES + more)


def option_of(name: str) -> str:
    """The option that stands for an argument."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def add_options(
    parser: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage]  # a parser or a group of one
    job: Callable[..., object],
    *names: str,
    short: str | None = None,
    required: bool = False,
) -> None:
    """Add options for arguments of a job, whose docstring has their help texts.

    ``; None for …`` or ``; None to …`` at the end of a text is the default in words; what comes after
    ``; in Python`` is left out.

    Args:
        parser: of the command.
        job: what the command calls.
        *names: of arguments, each with a metavar or choices where it needs one: ``"timeout SECONDS"``,
            ``"actions {random,zero}"``.
        short: a one-letter name beside it, such as ``-o``.
        required: must be given.
    """
    texts, parameters = _texts(job), inspect.signature(job).parameters
    for entry in names:
        name, _, metavar = entry.partition(" ")
        known = parameters.get(name)
        annotation: Any = RunOptions.__annotations__[name] if known is None else known.annotation
        default = None if known is None or known.default is known.empty else known.default
        text, *default_words = re.split("; None (?:for|to) ", texts.get(name, "").partition("; in Python")[0])
        if name in _SHARED:
            usual, text = _SHARED[name]
            metavar = metavar or usual
        shown = "".join(default_words) or (_RUN_DEFAULTS.get(name) if known is None else None)
        if default not in (None, ()) and default is not False:
            shown = str(default)
        given = _kind(getattr(annotation, "__forward_arg__", annotation), metavar)
        if given.get("action") == "append" and known is not None:
            default = list(default or ())
        if required:
            given["required"] = True
        parser.add_argument(
            *filter(None, (option_of(name), short)),
            dest=name,
            default=default,
            help=f"{text} (default: {shown})" if shown else text,
            **given,
        )


def add_repeatable(
    parser: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage]  # a parser or a group of one
    option: str,
    metavar: str,
    text: str,
) -> None:
    """Add an option that gathers what it is given with, in a list."""
    parser.add_argument(option, action="append", default=[], metavar=metavar, help=text)


def add_run_options(parser: argparse.ArgumentParser, job: Callable[..., object]) -> None:
    """Add what every measured job takes: what to run on, where the result goes and in what form."""
    add_task(parser)
    add_options(parser, job, *RunOptions.__annotations__)


def arguments_of(parsed: argparse.Namespace, job: Callable[..., object]) -> dict[str, Any]:
    """Whatever of the command line is an argument of ``job``; ``overrides`` are what ``--set`` says."""
    names = inspect.signature(job).parameters
    known = {*names, *RunOptions.__annotations__} if "options" in names else {*names}
    found = {name: value for name, value in vars(parsed).items() if name in known}
    if "overrides" in found:
        from headrace.envs._overrides import parse_assignments

        found["overrides"] = parse_assignments(found["overrides"] or ())
    return found


def _texts(job: Callable[..., object]) -> dict[str, str]:
    """What the docstring of a job says about its arguments, without markup and the last period."""
    section = (inspect.getdoc(job) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries: list[tuple[str, str]] = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: re.sub("``([^`]+)``", _plain, " ".join(text.split())).removesuffix(".") for name, text in entries}


def _plain(code: re.Match[str]) -> str:
    """What stands between backticks: one word as it is, several in quotes."""
    return f"'{code[1]}'" if " " in code[1] else code[1]


def _kind(annotation: str, metavar: str) -> dict[str, Any]:
    """What argparse has to know of an argument that is annotated so."""
    kinds = annotation.split(" | ")
    if kinds[0] == "bool":
        return {"action": "store_true"}
    if metavar.startswith("{"):
        return {"choices": metavar.strip("{}").split(",")}
    if kinds[0].startswith(("Iterable", "Mapping", "Sequence")):
        return {"action": "append", "metavar": metavar}
    kind = int if "int" in kinds else float if "float" in kinds else str
    return {"type": kind, "metavar": metavar or ("N" if kind is int else None)}
