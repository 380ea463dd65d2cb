"""Frames moved in Warp: a launch each, without the temporaries that torch needs. For CUDA; the CPU serves tests.

Frames are rows of words: bytes, or four at a time where they divide by four. A thread has one word of a frame.
"""

# Warp reads the annotations as types of its own language, which no type checker knows:
# pyright: reportInvalidTypeForm=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headrace._device import warp_launches
from headrace.errors import require_extra

wp: Any = require_extra("warp", extra="warp", purpose="moving frames on a CUDA device")
_Longs: Any = wp.array(dtype=wp.int64)
_Flags: Any = wp.array(dtype=wp.bool)
_Words: Any = wp.array2d(dtype=Any)


@wp.func
def _env_of(row: wp.int32, ids: _Longs, has_ids: wp.int32, mask: _Flags, has_mask: wp.int32) -> wp.int32:
    """The environment of a row; -1 where the mask leaves it out."""
    env = row
    if has_ids == 1:
        env = wp.int32(ids[row])
    if has_mask == 1:  # noqa: SIM102  # `and` would read the mask that is not there
        if not mask[env]:
            env = wp.int32(-1)
    return env


@wp.kernel(enable_backward=False)
def _push(
    ids: _Longs,
    has_ids: wp.int32,
    mask: _Flags,
    has_mask: wp.int32,
    rows: _Words,
    writes: wp.int32,
    by: _Longs,
    fill: _Flags,
    inner: wp.int32,
    length: wp.int32,
    data: _Words,
):
    row, word = wp.tid()
    env = _env_of(row, ids, has_ids, mask, has_mask)
    if env < 0:
        return
    first = (word // inner) * length * inner + word % inner
    if writes == 1 and fill[env]:
        for slot in range(length):
            data[env, first + slot * inner] = rows[row, word]
        return
    steps = wp.min(wp.int32(by[env]), length)
    for slot in range(length - steps):
        data[env, first + slot * inner] = data[env, first + (slot + steps) * inner]
    if writes == 1:
        for slot in range(length - steps, length - 1):
            data[env, first + slot * inner] = rows.dtype(0)
        data[env, first + (length - 1) * inner] = rows[row, word]


@wp.kernel(enable_backward=False)
def _append(
    ids: _Longs,
    has_ids: wp.int32,
    mask: _Flags,
    has_mask: wp.int32,
    rows: _Words,
    pushed: _Longs,
    length: wp.int32,
    data: _Words,
):
    row, word = wp.tid()
    env = _env_of(row, ids, has_ids, mask, has_mask)
    if env < 0:
        return
    slot = wp.int32(pushed[env] % wp.int64(length))
    data[env, slot * rows.shape[1] + word] = rows[row, word]


@wp.kernel(enable_backward=False)
def _copy(source: _Longs, target: _Longs, rows: _Words, out: _Words):
    row, word = wp.tid()
    out[wp.int32(target[row]), word] = rows[wp.int32(source[row]), word]


def push_warp(
    data: Tensor,
    rows: Tensor | None,
    ids: Tensor | None,
    mask: Tensor | None,
    by: Tensor,
    fill: Tensor,
    *,
    inner_bytes: int,
    length: int,
) -> None:
    """``OrderedFrames.push`` on memory (N, …, K, …), in place.

    Args:
        data: contiguous; a frame is in runs of ``inner_bytes`` bytes.
        rows: (n, …) with ``ids``, else (N, …); no memory of ``data``. None only moves.
        ids: int64 (n,), or None for all.
        mask: bool (N,): which of (N, …) rows count; None for all.
        by: int64 (N,).
        fill: bool (N,).
        inner_bytes: see ``data``.
        length: K.
    """
    word = _word(inner_bytes, data, *(() if rows is None else (rows,)))
    memory = _words(data, word)
    given = memory if rows is None else _words(rows, word)
    count = data.shape[0] if ids is None else ids.shape[0]
    if not count or not memory.shape[1]:
        return
    inputs = [*_chosen(ids, mask, by, fill), given, int(rows is not None), by, fill, inner_bytes // word.itemsize]
    _launch(_push, (count, memory.shape[1] // length), [*inputs, length], memory)


def append_warp(
    data: Tensor, rows: Tensor, ids: Tensor | None, mask: Tensor | None, pushed: Tensor, *, length: int
) -> None:
    """``DelayBuffer``: rows into slot ``pushed mod K`` of memory (N, K, …); arguments as in :func:`push_warp`."""
    word = _word(rows[0].nbytes if len(rows) else 1, data, rows)
    given = _words(rows, word)
    if given.numel():
        nobody = torch.zeros(1, dtype=torch.bool, device=data.device) if mask is None else mask
        _launch(_append, given.shape, [*_chosen(ids, mask, pushed, nobody), given, pushed, length], _words(data, word))


def copy_rows_warp(data: Tensor, source: Tensor, out: Tensor, target: Tensor) -> None:
    """Row ``source[i]`` of ``data`` becomes row ``target[i]`` of ``out``, both contiguous with rows of equal bytes."""
    word = _word(out[0].nbytes, data, out)
    memory = _words(out, word)
    if source.shape[0] and memory.shape[1]:
        _launch(_copy, (source.shape[0], memory.shape[1]), [source, target, _words(data, word)], memory)


def _launch(kernel: Any, dim: tuple[int, ...], inputs: list[Any], out: Tensor) -> None:
    with warp_launches(out.device) as device:
        given = [wp.from_torch(each) if isinstance(each, Tensor) else each for each in inputs]
        wp.launch(kernel, dim=dim, inputs=given, outputs=[wp.from_torch(out)], device=device)


def _chosen(ids: Tensor | None, mask: Tensor | None, longs: Tensor, flags: Tensor) -> list[Any]:
    """Ids and mask with a flag each; where there is none, some array of its dtype that nobody reads."""
    return [longs if ids is None else ids, int(ids is not None), flags if mask is None else mask, int(mask is not None)]


def _word(run_bytes: int, *tensors: Tensor) -> torch.dtype:
    """Four bytes at a time where every run begins and ends at a multiple of four."""
    even = run_bytes % 4 == 0 and all(tensor.data_ptr() % 4 == 0 for tensor in tensors)
    return torch.int32 if even else torch.uint8


def _words(rows: Tensor, word: torch.dtype) -> Tensor:
    flat = rows.contiguous().view(rows.shape[0], math.prod(rows.shape[1:]))
    return flat.view(torch.uint8).view(word)
