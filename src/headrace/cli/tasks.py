"""``headrace tasks`` and ``new``: what there is, and a package of your own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace._progress import say
from headrace.cli.records import Command, Positional, keywords
from headrace.envs.new_package import new_package
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from gymnasium import spaces

    from headrace.envs.task import Task


@dataclass(frozen=True, kw_only=True)
class TasksOptions:
    """List the tasks: make one in Python with headrace.make(NAME, num_envs=…)."""

    family: Annotated[Literal["libero"] | None, Positional()] = None
    """LIBERO's tasks instead of the others."""


def _tasks(given: TasksOptions) -> int:
    if given.family is not None:
        return _list_libero()
    from headrace.envs.registry import make_task, task_entry, task_names

    caption = "numbers are float32 unless they say otherwise; --set NAME=VALUE changes a setting on every command"
    table = Table(title="Tasks", caption=caption, box=box.SIMPLE_HEAD)
    table.add_column("task", no_wrap=True, style="bold")
    table.add_column("what it is")
    for name in task_names():
        words = Text()
        try:
            words.append(task_entry(name).summary)
            for line in _facts(make_task(name)):
                words.append(f"\n{line}", style="dim")
        except HeadraceError as error:  # the others are there all the same
            words.append(f"\ncannot be made here: {error}" if words else f"cannot be made here: {error}", style="red")
        table.add_row(name, words)
    Console().print(table)
    return 0


def _list_libero() -> int:
    from headrace.envs.tasks.libero.exported import list_tasks

    table = Table(title="LIBERO", caption="make one with headrace.make(NAME, num_envs=…)", box=box.SIMPLE_HEAD)
    table.add_column("task", no_wrap=True, style="bold")
    table.add_column("instruction")
    missing = Text("not exported: headrace libero export", "yellow")
    for name, instruction in list_tasks():
        table.add_row(name, missing if instruction is None else instruction)
    Console().print(table)
    return 0


def _facts(task: Task) -> list[str]:
    """Return the spaces of a task, in lines short enough for a terminal of 80 columns."""
    seen = ", ".join(f"{group} {_describe(space)}" for group, space in task.observation_space.spaces.items())
    cameras = ", ".join(filter(None, (task.model.camera(i).name for i in range(task.model.ncam)))) or "none"
    facts = [
        f"observes {seen}; acts with {_describe(task.action_space)}",
        f"{task.cfg.episode_length:,} steps; cameras: {cameras}",
    ]
    return facts if task.success_measure is None else [*facts, f"success: {task.success_measure}"]


def _describe(space: spaces.Space[object]) -> str:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return f"{int(space.n)} choices"
    size = "×".join(map(str, space.shape or ()))
    return size if str(space.dtype) == "float32" else f"{size} {space.dtype}"


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Write a package with a task around a robot model, its tests, and a training that starts."""

    name: Annotated[str, Positional("NAME")]
    """Name of the task, such as my-robot."""
    model: str | None = None
    """An MJCF or URDF file of the robot (default: a small arm)."""
    output: str | None = None
    """Where to write the result: a new file, or a new directory of several files (default: NAME, here)."""


def _new(given: NewOptions) -> int:
    root = new_package(**keywords(given))
    say(f"{root}: cd {root} && pip install -e . && python -m pytest && headrace train {given.name}")
    return 0


COMMANDS = {
    "new": Command(NewOptions, _new),
    "tasks": Command(TasksOptions, _tasks),
}
