"""Options that several commands have: one name and one help text for each idea."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_WHOLE: dict[str, Any] = {"type": int, "metavar": "N"}
_SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "--batch-size": ("rows of every batch in strict mode", _WHOLE),
    "--csv": ("write the per-episode table here", {"type": Path, "metavar": "FILE"}),
    "--episodes": ("episodes to play, with ids from 0, each counted once", _WHOLE),
    "--execute": ("actions executed of each chunk", _WHOLE),
    "--fast": (
        "batches of varying size, without padding rows; the last bits of an answer depend on the rest of its batch",
        {"action": "store_true"},
    ),
    "--horizon": ("actions of a chunk", _WHOLE),
    "--library": ("RL library: headrace, rl_games, rsl_rl, sb3, skrl, or one that an installed package adds", {}),
    "--num-envs": ("environments in the batch", _WHOLE),
    "--num-steps": ("steps of the batch", _WHOLE),
    "--output": ("where to write the result", {"type": Path, "metavar": "PATH"}),
    "--port": ("port to listen on; 0 for any free one", _WHOLE),
    "--preset": (
        "file of task settings ('path: value' lines), applied before --set; repeatable",
        {"type": Path, "metavar": "FILE.yaml", "action": "append"},
    ),
    "--renderer": ("what draws: native, gl (MuJoCo's own images) or warp", {"metavar": "NAME"}),
    "--resume": ("continue what was cut short: do only what its journal or checkpoint lacks", {"action": "store_true"}),
    "--seed": ("seed of episodes and of everything else that is random", _WHOLE),
    "--set": (
        "override a setting of the task, or an argument of a Gymnasium environment; repeatable",
        {"metavar": "PATH=VALUE", "action": "append"},
    ),
    "--threads": ("physics threads", _WHOLE),
    "--warmup-steps": ("steps before measuring, at least; more until the step time is steady", _WHOLE),
    "--video": ("record a video of the first environments", {"type": Path, "metavar": "FILE.mp4"}),
}


TASK = "TASK"
_SOURCES = "a name from 'headrace tasks', module:NAME, gym:ID, or a recipe file (.yaml, .json)"


def add_task(parser: argparse.ArgumentParser, *, more: str = "", optional: bool = False) -> None:
    """Add the argument that says what to make.

    Args:
        parser: of the command.
        more: further forms that this command takes, in words.
        optional: may be left out.
    """
    parser.add_argument("task", metavar=TASK, nargs="?" if optional else None, help=_SOURCES + more)


def add_option(
    parser: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage]  # a parser or a group of one
    name: str,
    *,
    default: object = None,
    otherwise: str | None = None,
    required: bool = False,
    short: str | None = None,
) -> None:
    """Add an option that other commands have, too.

    Args:
        parser: of the command.
        name: of the option, such as ``--num-envs``.
        default: its value where it is not given.
        otherwise: the default in words, where ``default`` does not show it.
        required: must be given.
        short: a one-letter name beside it, such as ``-o``.
    """
    text, arguments = _SHARED[name]
    defaults = {"append": list[str](), "store_true": False}
    given: dict[str, Any] = {**arguments, "default": defaults.get(str(arguments.get("action")), default)}
    if required:
        given["required"] = True
    shown = otherwise if otherwise is not None else default
    names = (name,) if short is None else (name, short)
    parser.add_argument(*names, help=text if shown is None else f"{text} (default: {shown})", **given)


def values(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Some of the options, as the arguments of a job that have their names; ``overrides`` are what ``--set`` says."""
    found = {name: getattr(arguments, name) for name in names if name != "overrides"}
    if "overrides" in names:
        from headrace.envs._overrides import parse_assignments

        found["overrides"] = parse_assignments(arguments.set)
    return found
