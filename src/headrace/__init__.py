"""headrace: the data path between batched robot simulation and policy.

Importing it registers the Gymnasium ids (``headrace/Ant-v0``, …) and does nothing else: heavy libraries load on use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from headrace.gymnasium_ids import register_ids

if TYPE_CHECKING:
    from headrace.envs import BatchEnv, Task, TaskCfg, make
    from headrace.types import Step

__version__ = "0.1.0"

__all__ = ["BatchEnv", "Step", "Task", "TaskCfg", "__version__", "make"]

_HOMES = {
    "BatchEnv": "headrace.envs",
    "Step": "headrace.types",
    "Task": "headrace.envs",
    "TaskCfg": "headrace.envs",
    "make": "headrace.envs",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__


register_ids()
