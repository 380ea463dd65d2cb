"""Watch environments, and draw what cameras see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.viewing.live import view as view
    from headrace.viewing.picturing import picture as picture

__getattr__, __dir__ = lazy_exports(__name__, __file__)
