"""Batched environments, tasks, registry and bridges."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.envs.batch_env import BatchEnv
    from headrace.envs.registry import SimName, TaskEntry, make, make_task, register_task, task_cfg, task_names
    from headrace.envs.rows import Rows
    from headrace.envs.table_task import TableTask
    from headrace.envs.task import Task, TaskCfg
    from headrace.envs.terms import TableCfg

__all__ = [
    "BatchEnv",
    "Rows",
    "SimName",
    "TableCfg",
    "TableTask",
    "Task",
    "TaskCfg",
    "TaskEntry",
    "make",
    "make_task",
    "register_task",
    "task_cfg",
    "task_names",
]

# loaded on use: a worker process of a bridge imports this package on its way, and has no need of torch
_HOMES = {
    "batch_env": ("BatchEnv",),
    "registry": ("SimName", "TaskEntry", "make", "make_task", "register_task", "task_cfg", "task_names"),
    "rows": ("Rows",),
    "table_task": ("TableTask",),
    "task": ("Task", "TaskCfg"),
    "terms": ("TableCfg",),
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
