"""headrace: the data path between batched robot simulation and policy.

Importing it registers the Gymnasium ids (``headrace/Ant-v0``, …) and does nothing else: heavy libraries load on use.
The stages have their own export lists: ``headrace.sim``, ``headrace.vision``, ``headrace.replay``,
``headrace.learning``, ``headrace.recording``, ``headrace.chunking``, ``headrace.rollout``, ``headrace.testing``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from headrace.gymnasium_ids import register_ids

if TYPE_CHECKING:
    from headrace.envs import (
        BatchEnv,
        Rows,
        TableCfg,
        TableTask,
        Task,
        TaskCfg,
        TaskEntry,
        make,
        register_task,
        task_names,
    )
    from headrace.envs.bridges import bridge
    from headrace.types import EpisodeEnds, StackSpec, Step

__version__ = "0.1.0"

__all__ = [
    "BatchEnv",
    "EpisodeEnds",
    "Rows",
    "StackSpec",
    "Step",
    "TableCfg",
    "TableTask",
    "Task",
    "TaskCfg",
    "TaskEntry",
    "__version__",
    "bridge",
    "make",
    "register_task",
    "task_names",
]

_HOMES = {
    "headrace.envs": (
        *("BatchEnv", "Rows", "TableCfg", "TableTask", "Task", "TaskCfg", "TaskEntry"),
        *("make", "register_task", "task_names"),
    ),
    "headrace.envs.bridges": ("bridge",),
    "headrace.types": ("EpisodeEnds", "StackSpec", "Step"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__


register_ids()
