"""Words at any address of bytes, for kernels that weave short runs of bytes: a byte at a time takes twice as long."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_Bytes = npt.NDArray[np.uint8]


def _place(context: Any, builder: Any, signature: Any, args: Any, bits: int) -> Any:
    """Return the address of element ``args[1]`` of the bytes ``args[0]``, as one of words."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.bitcast(builder.gep(array.data, [args[1]]), ir.IntType(bits).as_pointer())


def _load(_context: Any, data: Any, _at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(_place(context, builder, signature, args, 32), align=1)
        return builder.zext(word, ir.IntType(64))

    return types.uint64(data, types.int64), generate


def _store(bits: int) -> Any:
    def store(_context: Any, data: Any, _at: Any, _word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = args[2] if bits == 64 else builder.trunc(args[2], ir.IntType(bits))
            builder.store(word, _place(context, builder, signature, args, bits), align=1)
            return context.get_dummy_value()

        return types.void(data, types.int64, types.uint64), generate

    return intrinsic(store)


load4: Any = intrinsic(_load)
"""``load4(data, at)``: the four bytes at ``at`` as uint64; nothing checks the place."""
store2, store4, store8 = (_store(bits) for bits in (16, 32, 64))
"""``store4(data, at, word)``: the lowest four bytes of a uint64 to ``at``; nothing checks the place."""
