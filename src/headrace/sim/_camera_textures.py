"""The textures of a model as pyramids of ever smaller levels, packed for the camera's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.render_scene import F32, F64, I32, TEXTURE_2D, TEXTURE_CUBE, RenderTextures
from headrace.sim._mujoco_api import mujoco


class TextureTables:
    """The textures in use, each as a pyramid of ever smaller levels."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._numbers: dict[int, int] = {}
        self._pyramids: list[list[NDArray[np.uint8]]] = []
        self.kinds: list[int] = []

    def _faces(self, number: int) -> NDArray[np.uint8]:
        """(faces, height, width, 3): 1 face for a 2D texture, 6 for a cube."""
        raw = self._raw
        height, width, channels = raw.tex_height[number], raw.tex_width[number], raw.tex_nchannel[number]
        if raw.tex_adr[number] < 0:
            data = mujoco.mj_loadTexture(raw, number)[0].reshape(height, width, channels)
        else:
            start = raw.tex_adr[number]
            data = raw.tex_data[start : start + height * width * channels].reshape(height, width, channels)
        data = np.repeat(data, 3, axis=2) if channels == 1 else data[:, :, :3]
        if raw.tex_type[number] == int(mujoco.mjtTexture.mjTEXTURE_2D):
            return data[None]
        if height == width:
            return np.broadcast_to(data, (6, *data.shape))
        return data.reshape(6, width, width, 3)

    def flat_color(self, number: int) -> F32 | None:
        """The color of a texture that has only one."""
        faces = self._faces(number)
        first = faces[0, 0, 0]
        return first.astype(np.float32) / np.float32(255) if bool((faces == first).all()) else None

    def add(self, number: int) -> int:
        """Include a texture of the model; its number in the tables."""
        if number not in self._numbers:
            self._numbers[number] = len(self._pyramids)
            faces = self._faces(number)
            self._pyramids.append(_pyramid(faces))
            self.kinds.append(TEXTURE_2D if len(faces) == 1 else TEXTURE_CUBE)
        return self._numbers[number]

    def build(self, of_geom: I32, scale: F32, sky: int, haze: F32) -> RenderTextures | None:
        """All textures in one table, with scratch for pictures without pixels; None where there are none."""
        if not self._pyramids:
            return None
        return RenderTextures(
            of_geom=of_geom,
            scale=scale,
            texels=self._texels(),
            levels=self._levels(),
            kinds=np.array(self.kinds, np.int32),
            sky=sky,
            haze=haze,
            corners=np.empty((8, 0), np.int32),
            packed=np.empty((2, 0), np.uint64),
        )

    def _texels(self) -> NDArray[np.uint64]:
        """All levels of all textures, flat, one number per texel."""
        flat = [level.reshape(-1, 3) for pyramid in self._pyramids for level in pyramid]
        rgb = np.concatenate(flat).astype(np.uint64) if flat else np.zeros((1, 3), np.uint64)
        return rgb[:, 0] | rgb[:, 1] << np.uint64(21) | rgb[:, 2] << np.uint64(42)

    def _levels(self) -> I32:
        """(T, levels, 3): first texel, width, height."""
        most = max((len(pyramid) for pyramid in self._pyramids), default=1)
        table = np.zeros((len(self._pyramids), most, 3), np.int32)
        start = 0
        for t, pyramid in enumerate(self._pyramids):
            for k, level in enumerate(pyramid):
                table[t, k:] = start, level.shape[2], level.shape[1]
                start += level.size // 3
        return table


def _pyramid(faces: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Halve a texture (faces, height, width, 3) until one texel is left.

    A texel of the coarse level is read at its center from the fine one: the mean of two where the size is even, and no
    shift where it is odd.
    """
    levels = [np.ascontiguousarray(faces)]
    fine: F64 = faces.astype(np.float64)
    while fine.shape[1] > 1 or fine.shape[2] > 1:
        for axis in (1, 2):
            size = fine.shape[axis]
            if size > 1:
                at = (np.arange(size // 2) + 0.5) * (size / (size // 2)) - 0.5
                low = np.floor(at).astype(np.int64)
                weight = (at - low).reshape((-1, *([1] * (3 - axis))))
                fine = np.take(fine, low, axis) * (1 - weight) + np.take(fine, low + 1, axis) * weight
        levels.append(np.ascontiguousarray(np.round(fine).astype(np.uint8)))
    return levels
