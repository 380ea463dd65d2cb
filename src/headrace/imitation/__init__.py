"""Imitation: experts, demonstrations, behavior cloning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.imitation.imitating import imitate as imitate

__getattr__, __dir__ = lazy_exports(__name__, __file__)
