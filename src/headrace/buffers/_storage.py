"""Memory of the buffers: which dtypes it takes, that it outlives ``torch.inference_mode()``, and its snapshots."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.errors import DataError, DtypeError
from headrace.types import StateDict

_PLAIN = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}
# torch can store these but neither fill nor select them: the buffers only move bytes, so integers of the same size do
_CARRIED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}


def carrier(dtype: torch.dtype, name: str) -> torch.dtype:
    """The dtype in which frames of ``dtype`` are kept: the same bits, zero is zero."""
    if dtype in _PLAIN:
        return dtype
    if dtype not in _CARRIED:
        known = ", ".join(sorted(str(known).removeprefix("torch.") for known in (*_PLAIN, *_CARRIED)))
        raise DtypeError(f"{name}: expected one of {known}, got {dtype}; convert with .to()")
    return _CARRIED[dtype]


def carried(rows: Tensor, name: str) -> Tensor:
    """``rows`` as the buffers keep them: a view, without the history of gradients."""
    return rows.detach().view(carrier(rows.dtype, name))


def lasting_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that may be written to later, also if they are made inside ``torch.inference_mode()``."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def load_tensors(own: dict[str, Tensor], state: StateDict) -> None:
    """Copy tensors of ``state`` into the tensors of the same name; one that does not fit raises before any changes."""
    for name, tensor in own.items():
        given = state.get(name)
        if not isinstance(given, Tensor) or given.shape != tensor.shape or given.dtype != tensor.dtype:
            got = f"{tuple(given.shape)} of {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
            raise DataError(f"{name}: expected {tuple(tensor.shape)} of {tensor.dtype}, got {got}")
    for name, tensor in own.items():
        tensor.copy_(state[name])


def stored_frames(state: StateDict) -> Tensor | None:
    """``state["frames"]`` of a buffer's snapshot: None where nothing was appended yet, else with N and K axes."""
    if "frames" not in state:
        raise DataError(f"frames: expected them in the state, got only {', '.join(state) or 'an empty one'}")
    frames = state["frames"]
    if frames is None or (isinstance(frames, Tensor) and frames.dim() >= 2):
        return frames
    got = f"shape {tuple(frames.shape)}" if isinstance(frames, Tensor) else type(frames).__name__
    raise DataError(f"frames: expected None or a tensor with at least 2 axes, got {got}")
