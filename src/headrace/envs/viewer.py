"""Pictures of environments for people: one each, or tiled into one."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.envs.image_spec import ImageSpec, show_groups
from headrace.sim import Simulation
from headrace.sim.camera.camera import CameraFrames, CameraSpec, FreeView, PoseReader, SceneState, camera_names
from headrace.sim.camera.names import make_camera

_PIXELS = 240


class Viewer:
    """Draws environments as they are now with one of the model's cameras, or the free one.

    Args:
        sim: the simulation to look at.
        spec: what to take; None for a color picture.
        camera: which camera takes it; None for the first, the free one where the model has none. Not with ``spec``.
        images: the task's images: without ``spec``, the groups of geoms that the first of them shows are shown.
        renderer: ``native``, ``gl``, ``warp`` or a name of ``headrace.sim.camera.names.register_camera``.
    """

    def __init__(
        self,
        sim: Simulation,
        *,
        spec: CameraSpec | None = None,
        camera: str | None = None,
        images: Mapping[str, ImageSpec] | None = None,
        renderer: str = "native",
    ) -> None:
        model = sim.model
        self._state = SceneState(sim, PoseReader(model))
        if spec is None:
            name = camera_names(model)[0] if camera is None else camera
            spec = show_groups(images or {}, CameraSpec(name=name, width=_PIXELS, height=_PIXELS))
        self.renderer = renderer
        self._camera = make_camera(renderer, model, spec)

    @property
    def free(self) -> FreeView | None:
        """Where the free camera is; None for a camera of the model. What is set holds from the next picture on."""
        return getattr(self._camera, "free", None)

    @free.setter
    def free(self, view: FreeView) -> None:
        self._camera.free = view  # pyright: ignore[reportAttributeAccessIssue]  # cameras that draw it have it

    def frames(self, ids: Tensor | None = None) -> CameraFrames:
        """Return what the camera sees of the environments ``ids`` (n,), or of all; the caller owns it."""
        self._state.refresh()
        return self._camera.render(self._state.poses(self._state.take(ids).cpu().numpy()))

    def pictures(self, ids: Tensor | None = None) -> NDArray[np.uint8]:
        """Return uint8 (n, height, width, 3) of the environments ``ids`` (n,), or of all; the caller owns it."""
        rgb = self.frames(ids).rgb
        assert rgb is not None  # the spec asks for it
        return rgb

    def close(self) -> None:
        """Release the camera."""
        self._camera.close()


def tile(pictures: NDArray[np.uint8], *, gap: int = 2) -> NDArray[np.uint8]:
    """Put uint8 (n, H, W, 3) into one picture, row by row, ``gap`` black pixels apart; missing tiles are black."""
    count, height, width, channels = pictures.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    sheet = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap, channels), np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        sheet[top : top + height, left : left + width] = picture
    return sheet


def png(picture: NDArray[np.uint8]) -> bytes:
    """Encode uint8 (H, W, 3) with the standard library alone."""
    height, width, _ = picture.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with its filter, 0: none
    rows[:, 1:] = picture.reshape(height, -1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
