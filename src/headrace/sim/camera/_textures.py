"""Textures of a model with their mip levels, packed for the kernels and shared by cameras that show the same ones."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class _Image(NamedTuple):
    faces: NDArray[np.uint8]
    """(faces, height, width, channels): a view of the model's; one face if those of a cube are alike."""
    kind: int
    decode: bool
    """Whether the bytes are sRGB and colors are filtered in linear light, as OpenGL does."""
    folds: bool
    """Whether a single color may stand for the texture: not of the sky, which has no geom to wear it."""


def load_textures(raw: Any, numbers: Sequence[int]) -> TextureSet:
    """Return the textures ``numbers`` of a model: another camera's if they are equal, or new ones."""
    keys = [_key(raw, number) for number in numbers]
    with _lock:
        whole = hashlib.sha256(b"".join(keys)).digest()
        found = _shared.get(whole)
        if found is None:
            found = _shared[whole] = _build(raw, dict(zip(keys, numbers, strict=True)), keys)
    return found


def _key(raw: Any, number: int) -> bytes:
    """Return what a texture is, as a hash: of the name and time of its file where the model has it by reference."""
    facts = [int(getattr(raw, f"tex_{name}")[number]) for name in ("type", "colorspace", "nchannel", "width")]
    digest = hashlib.sha256(repr(facts).encode())
    path = raw.paths[raw.tex_pathadr[number] :].partition(b"\0")[0] if raw.tex_adr[number] < 0 else b""
    if path.startswith(b"/"):
        status = os.stat(path)
        digest.update(repr((path, status.st_mtime_ns, status.st_size)).encode())
    else:
        digest.update(np.ascontiguousarray(_read(raw, number).faces).data)
    return digest.digest()


def _read(raw: Any, number: int) -> _Image:
    if raw.tex_adr[number] < 0:  # by reference: the model has no size, either
        data, colors = mujoco.mj_loadTexture(raw, number)
    else:
        height, width, channels = (int(getattr(raw, f"tex_{name}")[number]) for name in ("height", "width", "nchannel"))
        start, colors = int(raw.tex_adr[number]), raw.tex_colorspace[number]
        data = raw.tex_data[start : start + height * width * channels].reshape(height, width, channels)
    width, channels = data.shape[1:]
    kinds = mujoco.mjtTexture
    if raw.tex_type[number] == int(kinds.mjTEXTURE_2D):
        return _Image(data[None], TEXTURE_2D, bool(colors == _SRGB), True)
    folds = bool(raw.tex_type[number] != int(kinds.mjTEXTURE_SKYBOX))
    return _Image(data.reshape(-1, width, width, channels), TEXTURE_CUBE, False, folds)


def _build(raw: Any, numbers: dict[bytes, int], keys: list[bytes]) -> TextureSet:
    """Pack the textures ``numbers`` by key, for those who ask by ``keys``."""
    images, colors, count = dict[bytes, _Image](), dict[bytes, F32](), 0
    rows = list[list[tuple[int, int, int, int]]]()
    for key, number in numbers.items():
        image = _read(raw, number)
        first = image.faces[0, 0, 0]
        if image.folds and (image.faces[0, 0] == first).all() and (image.faces == first).all():
            colors[key] = _light(image.decode)[np.broadcast_to(first[:3], 3)] / np.float32(255)
            continue
        images[key] = image
        sizes, count = _lay_out(image.faces.shape, count)
        rows.append(sizes)
    texels = np.empty(count, np.uint32)
    for image, sizes in zip(images.values(), rows, strict=True):
        _pack(image, sizes, texels)
    most = max(map(len, rows), default=1)
    places = {key: k for k, key in enumerate(images)}
    return TextureSet(
        texels=texels,
        levels=np.array([sizes + sizes[-1:] * (most - len(sizes)) for sizes in rows], np.int32).reshape(-1, most, 4),
        kinds=np.array([image.kind for image in images.values()], np.int32),
        slots=tuple(places.get(key, -1) for key in keys),
        colors=np.array([colors.get(key, np.ones(3, np.float32)) for key in keys], np.float32).reshape(-1, 3),
    )


def _light(decode: bool) -> F32:
    """(256,): the linear light, 0 … 255, of each byte of a texture."""
    value = np.arange(256) / 255
    if decode:
        value = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    return (value * 255).astype(np.float32)


def _lay_out(shape: tuple[int, ...], start: int) -> tuple[list[tuple[int, int, int, int]], int]:
    """Return rows of ``TextureSet.levels`` of one image, whose texels begin at ``start``, and where they end."""
    faces, height, width = shape[:3]
    sizes = list[tuple[int, int, int, int]]()
    while True:
        # six faces that are alike are kept once
        sizes.append((start, width, height, 0 if faces == 1 else width * height))
        start += faces * width * height
        if width == height == 1:
            return sizes, start
        width, height = max(width // 2, 1), max(height // 2, 1)


def _pack(image: _Image, sizes: list[tuple[int, int, int, int]], texels: U32) -> None:
    """Write the levels of one image to their places in ``texels``."""
    for number, face in enumerate(image.faces):
        fine: U32 | None = None
        for first, width, height, _ in sizes:
            at = first + number * width * height
            level = texels[at : at + width * height].reshape(height, width)
            if fine is None:
                pack_bytes(np.ascontiguousarray(face), (_light(image.decode) + 0.5).astype(np.uint32), level)
            else:
                halve(fine, level)
            fine = level


@kernel()
def pack_bytes(image: U8, light: U32, out: U32) -> None:
    """Pack bytes (h, w, channels), each as ``light`` (256,) has it, as texels (h, w); one channel serves all colors."""
    step = 1 if image.shape[2] >= 3 else 0
    for y in range(out.shape[0]):
        for x in range(out.shape[1]):
            texel = np.uint32(0)
            for c in range(3):
                texel |= np.uint32(light[image[y, x, c * step]] << np.uint32(8 * c))
            out[y, x] = texel


@kernel()
def halve(fine: U32, out: U32) -> None:
    """Make a level (h, w) from the one above it.

    A texel is read at its center from the finer level: the mean of two where the size is even, no shift where it is
    odd.
    """
    high, wide = fine.shape
    if high == 2 * out.shape[0] and wide == 2 * out.shape[1]:
        # the same, rounded as below, with red and blue in one word: the sum of four bytes has ten bits
        odd, even = np.uint32(0xFF00FF), np.uint32(0xFF00)
        for y in range(out.shape[0]):
            for x in range(out.shape[1]):
                a, b = fine[2 * y, 2 * x], fine[2 * y, 2 * x + 1]
                c, d = fine[2 * y + 1, 2 * x], fine[2 * y + 1, 2 * x + 1]
                pair = (a & odd) + (b & odd) + (c & odd) + (d & odd) + np.uint32(0x020002)
                green = (a & even) + (b & even) + (c & even) + (d & even) + np.uint32(0x0200)
                out[y, x] = ((pair >> np.uint32(2)) & odd) | ((green >> np.uint32(2)) & even)
        return
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
