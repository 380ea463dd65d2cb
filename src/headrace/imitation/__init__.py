"""Imitation: experts, demonstrations, behavior cloning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.imitation.cloning import CloneCfg as CloneCfg
    from headrace.imitation.cloning import clone as clone
    from headrace.imitation.demonstrations import Demonstrations as Demonstrations
    from headrace.imitation.demonstrations import load_demonstrations as load_demonstrations
    from headrace.imitation.demonstrations import record_demonstrations as record_demonstrations
    from headrace.imitation.imitating import imitate as imitate

__getattr__, __dir__ = lazy_exports(__name__, __file__)
