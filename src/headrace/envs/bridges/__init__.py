"""Bridges: environments that we did not write, under the contract of ``BatchEnv``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.envs.bridges._bridge_env import BridgeEnv
    from headrace.envs.bridges._foreign import CHILD_FILE
    from headrace.envs.bridges._rows import MJLAB_ENTRY, RowSimulator

__all__ = ["CHILD_FILE", "MJLAB_ENTRY", "BridgeEnv", "RowSimulator"]

# loaded on use: a worker process imports this package for its environments, and has no need of torch
__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "._bridge_env": ("BridgeEnv",),
        "._foreign": ("CHILD_FILE",),
        "._rows": ("MJLAB_ENTRY", "RowSimulator"),
    },
)
