"""Batched environments, tasks and their registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.envs.image_spec import ImageNoise as ImageNoise
    from headrace.envs.image_spec import ImageSpec as ImageSpec
    from headrace.envs.recipe import with_overrides as with_overrides
    from headrace.envs.registry import make_task as make_task

__getattr__, __dir__ = lazy_exports(__name__, __file__)
