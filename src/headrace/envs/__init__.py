"""Batched environments, tasks, registry and bridges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.envs._compiled_rows import CompiledRows, TaskArrays
    from headrace.envs._image_spec import ImageSpec
    from headrace.envs._overrides import with_overrides
    from headrace.envs._registry import make_task

__all__ = ["CompiledRows", "ImageSpec", "TaskArrays", "make_task", "with_overrides"]

# loaded on use: a worker process of a bridge imports this package on its way, and has no need of torch
__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "._compiled_rows": ("CompiledRows", "TaskArrays"),
        "._image_spec": ("ImageSpec",),
        "._overrides": ("with_overrides",),
        "._registry": ("make_task",),
    },
)
