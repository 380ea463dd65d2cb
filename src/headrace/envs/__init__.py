"""Batched environments, tasks and their registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.envs.image_spec import ImageNoise as ImageNoise
    from headrace.envs.image_spec import ImageSpec as ImageSpec

__getattr__, __dir__ = lazy_exports(__name__, __file__)
