"""Bridges: environments that we did not write, under the contract of ``BatchEnv``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.envs.bridges.bridge_env import BridgeEnv
    from headrace.envs.bridges.make import bridge

__all__ = ["BridgeEnv", "bridge"]

# loaded on use: a worker process imports this package for its environments, and has no need of torch
_HOMES = {"BridgeEnv": "headrace.envs.bridges.bridge_env", "bridge": "headrace.envs.bridges.make"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
