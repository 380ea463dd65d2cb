"""Evaluation and collection over many processes and machines, with Ray (extra ``ray``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.distributed._evaluate import collect, evaluate

__all__ = ["collect", "evaluate"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "headrace.distributed._evaluate": ("collect", "evaluate"),
    },
)
