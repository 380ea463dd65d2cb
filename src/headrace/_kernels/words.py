"""Vectors of bytes, for kernels that weave the pixels of several frames: a byte at a time takes eight times as long."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_BYTE = ir.IntType(8)


def _shuffle(builder: Any, one: Any, other: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(one, other, mask)


def _weave(count: int) -> Any:
    """Return the function that weaves four pixels of ``count`` frames."""

    def weave(_context: Any, row: Any, _at: Any, _stride: Any, frames: Any, _a: Any, _b: Any, _c: Any, _d: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            row, frames = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 3))

            def address(data: Any, at: Any, size: int) -> Any:
                return builder.bitcast(builder.gep(data, [at]), ir.VectorType(_BYTE, size).as_pointer())

            given = [builder.load(address(frames, place, 16), align=1) for place in args[4 : 4 + count]]
            given += given[:1] * (4 - count)
            first, last = (_shuffle(builder, given[i], given[i + 1], list(range(32))) for i in (0, 2))
            at = args[1]
            for pixel in range(4):
                lanes = [16 * frame + 3 * pixel + color for frame in range(count) for color in range(3)]
                builder.store(_shuffle(builder, first, last, lanes), address(row, at, len(lanes)), align=1)
                at = builder.add(at, args[2])
            return context.get_dummy_value()

        long = types.int64
        return types.void(row, long, long, frames, long, long, long, long), generate

    return intrinsic(weave)


weave2, weave3, weave4 = (_weave(count) for count in (2, 3, 4))
"""``weave3(row, at, stride, frames, a, b, c, d)``: the three bytes at ``a``, ``b`` and ``c`` of the bytes ``frames`` to
``at`` of the bytes ``row``, the next three to ``at + stride``, and so on for four pixels. Loads sixteen bytes from each
place that it uses; nothing checks the places."""
