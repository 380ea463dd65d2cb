"""Bridges: environments that we did not write, under the contract of ``BatchEnv``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.bridges._batched import MJLAB_ENTRY, RowSimulator
    from headrace.bridges._foreign import CHILD_FILE
    from headrace.bridges.bridge_env import BridgeEnv

__all__ = ["CHILD_FILE", "MJLAB_ENTRY", "BridgeEnv", "RowSimulator"]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
