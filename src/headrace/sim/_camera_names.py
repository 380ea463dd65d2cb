"""Cameras by name: what ``ImageSpec(renderer=…)`` chooses from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from headrace.errors import ConfigError, UnknownNameError
from headrace.sim._camera import Camera, CameraSpec
from headrace.sim._mujoco_api import Model

if TYPE_CHECKING:
    import torch

CameraFactory: TypeAlias = Callable[[Model, CameraSpec, int | None], Camera]
"""Makes a camera for a model; the number is of the threads it may use, None for all cores."""


def make_camera(
    name: str, model: Model, spec: CameraSpec, *, threads: int | None = None, device: torch.device | None = None
) -> Camera:
    """A camera by name: ``native``, ``gl``, ``warp``, or one of :func:`register_camera`.

    ``device`` is where ``warp`` draws; None for the first GPU, or the CPU where there is none.
    """
    check_camera_name(name)
    if name == "warp" and device is not None:
        from headrace.sim._warp_camera import WarpCamera

        return WarpCamera(model, spec, device=device)
    return _CAMERAS[name](model, spec, threads)


def check_camera_name(name: str) -> None:
    """Refuse a name that no camera has."""
    if name not in _CAMERAS:
        raise UnknownNameError("renderer", name, _CAMERAS)


def camera_names() -> list[str]:
    """The names of all cameras, sorted."""
    return sorted(_CAMERAS)


def register_camera(name: str, make: CameraFactory) -> None:
    """Give a camera of your own a name, for ``ImageSpec(renderer=name)``. A name that is taken is refused."""
    if name in _CAMERAS:
        raise ConfigError(f"register_camera: {name!r} is taken; choose another name")
    _CAMERAS[name] = make


def _native(model: Model, spec: CameraSpec, threads: int | None) -> Camera:
    from headrace.sim._native_camera import NativeCamera

    return NativeCamera(model, spec, threads=threads)


def _gl(model: Model, spec: CameraSpec, threads: int | None) -> Camera:
    from headrace.sim._gl_camera import GLCamera

    del threads  # one image after the other
    return GLCamera(model, spec)


def _warp(model: Model, spec: CameraSpec, threads: int | None) -> Camera:
    from headrace.sim._warp_camera import WarpCamera

    del threads  # Warp's own
    return WarpCamera(model, spec)


_CAMERAS: dict[str, CameraFactory] = {"native": _native, "gl": _gl, "warp": _warp}
