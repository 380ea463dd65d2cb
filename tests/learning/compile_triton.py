"""Compile the Triton layers ahead of time, without a GPU: ``python compile_triton.py 80 64 512``.

Prints one JSON record per hidden size and kernel: bytes of shared memory and of the binary, asynchronous copies and
barriers. Not with ``TRITON_INTERPRET``, which replaces the compiler.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headrace.learning import _triton_layers as layers

KERNELS: list[Any] = [layers._gru_forward, layers._gru_backward, layers._lstm_forward, layers._lstm_backward]
_FLAGS = ("resets_ptr", "active_ptr")
_NUMBERS = ("steps", "envs", "size")


def compile_layer(kernel: Any, architecture: int, hidden: int) -> dict[str, object]:
    """Compile one kernel as a launch on float32 tensors would, up to the binary of ptxas."""
    fixed = layers.tiles(hidden)
    signature = {
        name: "*i8" if name in _FLAGS else "i32" if name in _NUMBERS else "constexpr" if name in fixed else "*fp32"
        for name in kernel.arg_names
    }
    # a launch finds that pointers, and most sizes, are multiples of 16
    aligned = [name for name in signature if name.endswith("_ptr") or (name == "size" and hidden % 16 == 0)]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature=signature, constexprs=fixed, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=layers.OPTIONS)
    return {
        "kernel": kernel.__name__,
        "architecture": architecture,
        "hidden": hidden,
        "shared": made.metadata.shared,
        "binary": len(made.asm["cubin"]),
        "async_copies": made.asm["ptx"].count("cp.async"),
        "barriers": made.asm["ptx"].count("bar.sync"),
    }


if __name__ == "__main__":
    architecture, *sizes = map(int, sys.argv[1:])
    for size in sizes:
        for kernel in KERNELS:
            print(json.dumps(compile_layer(kernel, architecture, size)), flush=True)
