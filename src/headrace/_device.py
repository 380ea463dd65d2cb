"""Streams of a GPU and copies to it: the one place that names either.

The rule: all that headrace runs on a CUDA device, Warp's kernels included, is queued on torch's current stream of that
device, as torch's own operations are. So ``torch.cuda.stream(s)`` around a call moves all of it, and nothing needs to
wait for anything else.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


def current_stream(device: torch.device) -> Any:
    """Return the stream on which work for ``device`` is queued now: torch's current one; None for the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """For another thread, which would queue on the default stream: what is in the block goes to ``stream`` instead."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


@contextmanager
def warp_launches(device: torch.device) -> Generator[Any]:
    """Inside the block Warp launches on :func:`current_stream`; gives Warp's device."""
    import warp

    warp.init()  # a first launch in this process may be ours
    stream = current_stream(device)
    there: Any = warp.device_from_torch(device)
    if stream is None:
        with warp.ScopedDevice(there):
            yield there
        return
    # no events between Warp's own stream and this one: nothing of ours is queued on Warp's
    with warp.ScopedStream(warp.stream_from_torch(stream), sync_enter=False):
        yield there


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor on ``device``; does not wait for a GPU (a plain ``.to`` does).

    CPU: the tensor itself.
    """
    if device.type == "cpu":
        return host
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same tensors on the CPU, without gradients, in one copy for all of a device: one wait of the host.

    CPU tensors are given back as they are.
    """
    found = dict(tensors)
    for device in {tensor.device for tensor in tensors.values()}:
        if device.type == "cpu":
            continue
        # the largest items first: every part begins at a multiple of its own
        names = [name for name, tensor in tensors.items() if tensor.device == device]
        names.sort(key=lambda name: -tensors[name].element_size())
        parts = [tensors[name].detach().reshape(-1).view(torch.uint8) for name in names]
        packed, at = torch.cat(parts).cpu(), 0
        for name, part in zip(names, parts, strict=True):
            there = tensors[name]
            found[name] = packed[at : at + part.shape[0]].view(there.dtype).view(there.shape)
            at += part.shape[0]
    return found


@functools.lru_cache(maxsize=256)
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a few numbers on ``device``, kept: sent there once, since each time the host would wait.

    Do not write into it.
    """
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
