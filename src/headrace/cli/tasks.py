"""``headrace tasks``: what there is to simulate."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from gymnasium import spaces


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    """Add the sub-command."""
    parser = commands.add_parser(
        "tasks",
        help="list the tasks with their spaces and success measures",
        description="List the tasks: make one in Python with headrace.make(NAME, num_envs=…).",
    )
    parser.set_defaults(handler=_tasks)


def _tasks(arguments: argparse.Namespace) -> int:
    del arguments
    from headrace.envs import make_task, task_names
    from headrace.envs.registry import task_entry

    table = Table(title="Tasks", caption="settings can be changed with --set NAME=VALUE on every command")
    table.add_column("task", no_wrap=True)
    for column in ("what it is", "observations", "actions", "cameras", "steps"):
        table.add_column(column)
    for name in task_names():
        task = make_task(name)
        observations = "\n".join(
            f"{group} {_described(space)}" for group, space in task.observation_space.spaces.items()
        )
        cameras = "\n".join(task.model.camera(i).name for i in range(task.model.ncam)) or "–"
        table.add_row(
            *(f"[bold]{name}[/]", _summary(task_entry(name).summary, task.success_measure), observations),
            *(_described(task.action_space), cameras, str(task.cfg.episode_length)),
        )
    Console().print(table)
    return 0


def _summary(summary: str, success_measure: str | None) -> str:
    return summary if success_measure is None else f"{summary}\n[dim]success: {success_measure}[/]"


def _described(space: spaces.Space[object]) -> str:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return f"{int(space.n)} choices"
    return f"{space.dtype} {'×'.join(map(str, space.shape or ()))}"
