"""Batched environments, tasks, registry and bridges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.envs._batch_env import BatchEnv
    from headrace.envs._compiled_rows import CompiledRows, TaskArrays
    from headrace.envs._image_spec import ImageSpec
    from headrace.envs._overrides import with_overrides
    from headrace.envs._recipe import EnvRecipe, SimName
    from headrace.envs._registry import TaskEntry, make, make_task, register_task, task_cfg, task_names
    from headrace.envs._rows import Rows
    from headrace.envs._task import Task, TaskCfg
    from headrace.envs._term_task import TermTask
    from headrace.envs._terms import TermTaskCfg

__all__ = [
    "BatchEnv",
    "CompiledRows",
    "EnvRecipe",
    "ImageSpec",
    "Rows",
    "SimName",
    "Task",
    "TaskArrays",
    "TaskCfg",
    "TaskEntry",
    "TermTask",
    "TermTaskCfg",
    "make",
    "make_task",
    "register_task",
    "task_cfg",
    "task_names",
    "with_overrides",
]

# loaded on use: a worker process of a bridge imports this package on its way, and has no need of torch
__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "._batch_env": ("BatchEnv",),
        "._compiled_rows": ("CompiledRows", "TaskArrays"),
        "._image_spec": ("ImageSpec",),
        "._overrides": ("with_overrides",),
        "._recipe": ("EnvRecipe", "SimName"),
        "._registry": ("TaskEntry", "make", "make_task", "register_task", "task_cfg", "task_names"),
        "._rows": ("Rows",),
        "._term_task": ("TermTask",),
        "._task": ("Task", "TaskCfg"),
        "._terms": ("TermTaskCfg",),
    },
)
