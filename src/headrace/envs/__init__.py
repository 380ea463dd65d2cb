"""Batched environments, tasks, registry and bridges."""

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
