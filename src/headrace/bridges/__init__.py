"""Bridges: environments that we did not write, under the contract of ``BatchEnv``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.bridges._batched import MJLAB_ENTRY as MJLAB_ENTRY
    from headrace.bridges._batched import RowSimulator as RowSimulator
    from headrace.bridges.bridge_env import BridgeEnv as BridgeEnv

__getattr__, __dir__ = lazy_exports(__name__, __file__)
