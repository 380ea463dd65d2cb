"""Batched environments, tasks and their registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.envs._compiled import CompiledRows, TaskArrays
    from headrace.envs.image_spec import ImageNoise, ImageSpec
    from headrace.envs.recipe import with_overrides
    from headrace.envs.registry import make_task

__all__ = [
    "CompiledRows",
    "ImageNoise",
    "ImageSpec",
    "TaskArrays",
    "make_task",
    "with_overrides",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
