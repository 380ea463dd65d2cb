"""Imitation: experts, demonstrations, behavior cloning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.imitation.cloning import CloneCfg, clone
    from headrace.imitation.demonstrations import Demonstrations, load_demonstrations, record_demonstrations
    from headrace.imitation.imitating import imitate

__all__ = [
    "CloneCfg",
    "Demonstrations",
    "clone",
    "imitate",
    "load_demonstrations",
    "record_demonstrations",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
