"""``headrace imitate``: clone an expert, or a dataset, into a chunk policy, and say how good the clone is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console
from rich.progress import TaskProgressColumn, TimeRemainingColumn
from rich.table import Table

from headrace._interrupts import exit_code
from headrace._progress import progress, say
from headrace.cli.records import Command, Positional, keywords
from headrace.errors import ConfigError
from headrace.imitation.imitating import imitate

if TYPE_CHECKING:
    from headrace.imitation.imitating import ImitationResult

_MOST_ROWS = 10


def _split(text: str) -> Sequence[str]:
    return text.split(",")


@dataclass(frozen=True, kw_only=True)
class ImitateOptions:
    """Record successful episodes of TASK's expert, or take those of a dataset, train a small action-chunking
    transformer on them, save it, and evaluate it on episodes it has not seen, compared with the same model untrained
    and with the mean action. --episodes 0 leaves the evaluation out."""

    task: Annotated[str | None, Positional("TASK")] = None
    """A name from 'headrace tasks', module:NAME, gym:ID, or a recipe file (.yaml, .json); it must have an expert, or,
    with --dataset, it is evaluated in (default: what the dataset was recorded in)."""
    dataset: str | None = None
    """A recorded dataset, ours or LeRobot's (version 3)."""
    groups: Annotated[Sequence[str] | None, _split] = None
    """Observation groups of the dataset to learn from (default: all but critic)."""
    keep: Literal["succeeded", "all"] | None = None
    """Episodes of the dataset to learn from (default: the successful ones, where it says which)."""
    demos: int = 2000
    """Successful episodes of the expert to learn from."""
    updates: int | None = None
    """Steps of the optimizer (default: 8000)."""
    held_out: float | None = None
    """Share of the episodes that are not learned from, and that a loss is measured on (default: a tenth of a dataset's,
    none of an expert's)."""
    act: Mapping[str, object] | None = None
    """A setting of the policy or of its training, for example horizon=100, width=128, batch=64."""
    resume: bool = False
    output: str
    num_envs: int = 128
    seed: int = 0
    overrides: Mapping[str, object] | None = None
    episodes: int = 300
    execute: int | None = None


def _imitate(given: ImitateOptions) -> int:
    settings = keywords(given)
    training = {"updates": settings.pop("updates", None), "held_out": settings.pop("held_out", None)}
    chosen = {name: value for name, value in training.items() if value is not None}
    act = settings.pop("act") or {}
    for name in act.keys() & chosen.keys():
        option = name.replace("_", "-")
        raise ConfigError(f"--{option} and --act {name}=…: expected one of them, got both")
    settings["settings"] = {**act, **chosen}
    with progress("imitating", None, TaskProgressColumn(), TimeRemainingColumn()) as show:

        def update(stage: str, done: int, total: int) -> None:
            show(description=stage, completed=done, total=total)

        result = imitate(**settings, on_progress=update)
    console = Console()
    if result.losses:
        console.print(_loss_table(result))
    if result.evaluations:
        console.print(_table(result))
    else:
        console.print("not evaluated: --episodes is 0, or the dataset does not name its environment (TASK)")
    say(f"{result.path}: {result.path.stat().st_size:,} bytes, sha256 {result.sha256}")
    return 0 if result.interrupt is None else exit_code(result.interrupt)


def _loss_table(found: ImitationResult) -> Table:
    held = f", {found.held_out} of them held out" if found.held_out else ""
    table = Table(title=f"{found.demonstrations} demonstrations of {found.attempted} episodes{held}")
    for name in ("updates", "loss", "held-out loss"):
        table.add_column(name, justify="right")
    every = max(1, math.ceil(len(found.losses) / _MOST_ROWS))
    for loss in found.losses[::-1][::every][::-1]:
        held_out = "" if loss.held_out is None else f"{loss.held_out:.3f}"
        table.add_row(f"{loss.updates:,}", f"{loss.train:.3f}", held_out)
    return table


def _table(found: ImitationResult) -> Table:
    judged = any(result.success_rate is not None for result in found.evaluations.values())
    table = Table(title=str(found.source))
    table.add_column("policy")
    table.add_column("success" if judged else "mean reward", justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("episodes", justify="right")
    for name, result in found.evaluations.items():
        figure = result.success_rate if judged else result.mean_reward
        if figure is not None:
            form = ".1%" if judged else ".4g"
            interval = f"{figure.low:{form}} to {figure.high:{form}}"
            table.add_row(name, f"{figure.value:{form}}", interval, f"{len(result.episodes):,}")
    return table


COMMANDS = {"imitate": Command(ImitateOptions, _imitate)}
