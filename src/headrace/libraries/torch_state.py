"""Global state that libraries change: put back after a run, and saved where resuming needs it."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

from headrace.types import StateDict


@contextmanager
def library_run(seed: int | None = None) -> Generator[None]:
    """Run a library within a block; torch, numpy and ``random`` are as before afterwards.

    Inside, torch runs on one thread: with the physics on its own threads, more make small networks slower.

    Args:
        seed: for the three random streams, inside the block.
    """
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    cudnn, cuda = cast("Any", torch.backends.cudnn), torch.backends.cuda.matmul
    flags = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, cuda.allow_tf32
    # set_printoptions has no counterpart that reads
    options = torch._tensor_str.PRINT_OPTS  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    printing = dict(vars(options))
    # the same: only a setter is public
    checked = torch.distributions.Distribution._validate_args  # pyright: ignore[reportPrivateUsage]
    streams = random_state()
    torch.set_num_threads(1)
    torch.distributions.Distribution.set_default_validate_args(False)  # as rsl_rl and skrl do when they are imported
    if seed is not None:
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            # setting it, even to what it is, imports torch's compiler, which takes seconds
            torch.use_deterministic_algorithms(deterministic)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, cuda.allow_tf32 = flags
        vars(options).update(printing)
        torch.distributions.Distribution.set_default_validate_args(checked)
        load_random_state(streams)


def random_state() -> StateDict:
    """Return the streams of torch (CPU), numpy and ``random``, as tensors and numbers."""
    name, keys, position, has_gauss, gauss = cast(
        "tuple[str, np.ndarray[tuple[int], np.dtype[np.uint32]], int, int, float]", np.random.get_state()
    )
    version, words, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "random": [version, torch.tensor(words, dtype=torch.int64), gauss_next],
    }


def load_random_state(state: StateDict) -> None:
    """Put the streams back where :func:`random_state` found them."""
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, gauss_next = state["random"]
    random.setstate((version, tuple(words.tolist()), gauss_next))
