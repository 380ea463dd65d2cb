"""Cameras by name: what ``ImageSpec(renderer=…)`` chooses from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from headrace.errors import ConfigError, UnknownNameError
from headrace.sim.camera.camera import Camera, CameraSpec
from headrace.sim.mujoco_api import Model

if TYPE_CHECKING:
    import torch

CameraFactory: TypeAlias = Callable[[Model, CameraSpec, int | None], Camera]
"""Makes a camera for a model; the number is of the threads it may use, None for all cores."""


_OURS = ("native", "gl", "warp")
_REGISTERED: dict[str, CameraFactory] = {}


def make_camera(
    name: str,
    model: Model,
    spec: CameraSpec,
    *,
    threads: int | None = None,
    device: torch.device | str | None = None,
    backend: Literal["egl", "osmesa"] = "egl",
) -> Camera:
    """Return a camera by name: ``native``, ``gl``, ``warp``, or one of :func:`register_camera`.

    Args:
        name: what draws.
        model: the model that poses belong to.
        spec: which of its cameras, and what to take.
        threads: of ``native``, and for a camera of your own; None for all cores.
        device: where ``warp`` draws; None for the first GPU, or the CPU where there is none.
        backend: what gives ``gl`` a context.
    """
    check_camera_name(name)
    if name == "native":
        from headrace.sim.camera.native_camera import NativeCamera

        return NativeCamera(model, spec, threads=threads)
    if name == "gl":
        from headrace.sim.camera._gl_camera import GLCamera

        return GLCamera(model, spec, backend=backend)
    if name == "warp":
        from headrace.sim.camera.warp_camera import WarpCamera

        return WarpCamera(model, spec, device=device)
    return _REGISTERED[name](model, spec, threads)


def check_camera_name(name: str) -> None:
    """Refuse a name that no camera has."""
    if name not in camera_names():
        raise UnknownNameError("renderer", name, camera_names())


def camera_names() -> list[str]:
    """Return the names of all cameras, sorted."""
    return sorted((*_OURS, *_REGISTERED))


def register_camera(name: str, make: CameraFactory) -> None:
    """Give a camera of your own a name, for ``ImageSpec(renderer=name)``. A name that is taken is refused."""
    if name in camera_names():
        raise ConfigError(f"register_camera: {name!r} is taken; choose another name")
    _REGISTERED[name] = make
