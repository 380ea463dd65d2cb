"""Textures of a model with their mip levels, packed for the kernels and shared by cameras that show the same ones."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import helper, kernel
from headrace.sim.camera._render_scene import F32, I32, TEXTURE_2D, TEXTURE_CUBE, U8, U32
from headrace.sim.mujoco_api import mujoco

_SRGB = 2  # mjCOLORSPACE_SRGB
_shared: weakref.WeakValueDictionary[bytes, TextureSet] = weakref.WeakValueDictionary()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TextureSet:
    """Some textures of a model, each image once; those of one color are that color."""

    texels: U32
    """Flat: rows of each face of each level of each texture; red, green << 8, blue << 16."""
    levels: I32
    """(T, levels, 4): first texel, width, height, and texels from one face of a cube to the next (0 if all are alike).
    Textures with fewer levels repeat their last."""
    kinds: I32
    """(T,): TEXTURE_2D or TEXTURE_CUBE."""
    slots: tuple[int, ...]
    """Of each texture that was asked for: its row in ``levels``, or -1 if it has one color."""
    colors: F32
    """(textures that were asked for, 3): the color of those in 0 … 1; ones for the others."""


@dataclass(frozen=True, slots=True)
class _Image:
    faces: NDArray[np.uint8]
    """(faces, height, width, channels): a view of the model's; one face if those of a cube are alike."""
    kind: int
    decode: bool
    """Whether the bytes are sRGB and colors are filtered in linear light, as OpenGL does."""
    folds: bool
    """Whether a single color may stand for the texture: not of the sky, which has no geom to wear it."""

    def key(self) -> bytes:
        digest = hashlib.sha256(repr((self.faces.shape, self.kind, self.decode, self.folds)).encode())
        digest.update(np.ascontiguousarray(self.faces).data)
        return digest.digest()


def load_textures(raw: Any, numbers: Sequence[int]) -> TextureSet:
    """Return the textures ``numbers`` of a model: another camera's if their bytes are equal, or new ones."""
    images = [_read(raw, number) for number in numbers]
    keys = [image.key() for image in images]
    with _lock:
        whole = hashlib.sha256(b"".join(keys)).digest()
        found = _shared.get(whole)
        if found is None:
            found = _shared[whole] = _build(images, keys)
    return found


def _read(raw: Any, number: int) -> _Image:
    height, width, channels = (int(getattr(raw, f"tex_{name}")[number]) for name in ("height", "width", "nchannel"))
    if raw.tex_adr[number] < 0:
        data = mujoco.mj_loadTexture(raw, number)[0].reshape(height, width, channels)
    else:
        start = int(raw.tex_adr[number])
        data = raw.tex_data[start : start + height * width * channels].reshape(height, width, channels)
    kinds = mujoco.mjtTexture
    if raw.tex_type[number] == int(kinds.mjTEXTURE_2D):
        return _Image(data[None], TEXTURE_2D, bool(raw.tex_colorspace[number] == _SRGB), True)
    folds = bool(raw.tex_type[number] != int(kinds.mjTEXTURE_SKYBOX))
    return _Image(data.reshape(-1, width, width, channels), TEXTURE_CUBE, False, folds)


def _build(images: list[_Image], keys: list[bytes]) -> TextureSet:
    slots, colors = list[int](), np.ones((len(images), 3), np.float32)
    packed: dict[bytes, tuple[int, list[tuple[int, int, int, int]], U32]] = {}
    start = 0
    for image, key, color in zip(images, keys, colors, strict=True):
        first = image.faces[0, 0, 0]
        if image.folds and key not in packed and (image.faces[0, 0] == first).all() and (image.faces == first).all():
            color[:] = _light(image.decode)[np.broadcast_to(first[:3], 3)] / np.float32(255)
            slots.append(-1)
            continue
        if key not in packed:
            sizes, texels = _pack(image, start)
            packed[key] = len(packed), sizes, texels
            start += len(texels)
        slots.append(packed[key][0])
    most = max((len(sizes) for _, sizes, _ in packed.values()), default=1)
    rows = [sizes + sizes[-1:] * (most - len(sizes)) for _, sizes, _ in packed.values()]
    kinds = {slot: image.kind for image, slot in zip(images, slots, strict=True) if slot >= 0}
    return TextureSet(
        texels=np.concatenate([np.zeros(0, np.uint32), *(texels for _, _, texels in packed.values())]),
        levels=np.array(rows, np.int32).reshape(-1, most, 4),
        kinds=np.array([kinds[slot] for slot in range(len(packed))], np.int32),
        slots=tuple(slots),
        colors=colors,
    )


def _light(decode: bool) -> F32:
    """(256,): the linear light, 0 … 255, of each byte of a texture."""
    value = np.arange(256) / 255
    if decode:
        value = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    return (value * 255).astype(np.float32)


def _pack(image: _Image, start: int) -> tuple[list[tuple[int, int, int, int]], U32]:
    """Return rows of ``TextureSet.levels`` and the texels of one image, which begin at ``start`` of all."""
    faces, height, width = image.faces.shape[:3]
    # six faces that are alike are kept once
    apart = 0 if faces == 1 else 1
    sizes = list[tuple[int, int, int, int]]()
    count = 0
    while True:
        sizes.append((start + count, width, height, apart * width * height))
        count += faces * width * height
        if width == height == 1:
            break
        width, height = max(width // 2, 1), max(height // 2, 1)
    texels = np.empty(count, np.uint32)
    for face in range(faces):
        fine: U32 | None = None
        for first, width, height, _ in sizes:
            at = first - start + face * width * height
            level = texels[at : at + width * height].reshape(height, width)
            if fine is None:
                pack_bytes(np.ascontiguousarray(image.faces[face]), _light(image.decode), level)
            else:
                halve(fine, level)
            fine = level
    return sizes, texels


@kernel()
def pack_bytes(image: U8, light: F32, out: U32) -> None:
    """Pack bytes (h, w, channels) as texels (h, w); a single channel serves all three colors."""
    step = 1 if image.shape[2] >= 3 else 0
    for y in range(out.shape[0]):
        for x in range(out.shape[1]):
            texel = np.uint32(0)
            for c in range(3):
                value = np.uint32(light[image[y, x, c * step]] + np.float32(0.5))
                texel |= np.uint32(value << np.uint32(8 * c))
            out[y, x] = texel


@kernel()
def halve(fine: U32, out: U32) -> None:
    """Make a level (h, w) from the one above it.

    A texel is read at its center from the finer level: the mean of two where the size is even, no shift where it is
    odd.
    """
    high, wide = fine.shape
    for y in range(out.shape[0]):
        y_0, y_1, part_y = coarse_place(y, high, out.shape[0])
        for x in range(out.shape[1]):
            x_0, x_1, part_x = coarse_place(x, wide, out.shape[1])
            a, b, c, d = fine[y_0, x_0], fine[y_0, x_1], fine[y_1, x_0], fine[y_1, x_1]
            texel = np.uint32(0)
            for color in range(3):
                shift = np.uint32(8 * color)
                upper = color_byte(a, shift) * (1 - part_x) + color_byte(b, shift) * part_x
                lower = color_byte(c, shift) * (1 - part_x) + color_byte(d, shift) * part_x
                value = np.uint32(upper * (1 - part_y) + lower * part_y + np.float32(0.5))
                texel |= np.uint32(value << shift)
            out[y, x] = texel


@helper
def color_byte(texel: np.uint32, shift: np.uint32) -> np.float32:
    """Return one color of a texel."""
    return np.float32((texel >> shift) & np.uint32(255))


@helper
def coarse_place(at: int, fine: int, coarse: int) -> tuple[int, int, np.float32]:
    """Return the two texels of the finer level around the center of a coarse one, and the weight of the second."""
    place = (at + 0.5) * (fine / coarse) - 0.5
    low = int(np.floor(place))
    return low, min(low + 1, fine - 1), np.float32(place - low)
