"""OutputPool: blocks come back by themselves, and never while anybody can read them."""

from __future__ import annotations

import gc
import sys
import threading

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError
from headrace.history.output import OutputPool

SHAPE = (256, 1024)  # 1 MiB of float32, above the size that malloc handles itself


def test_a_block_is_handed_out_again_once_its_tensor_is_gone() -> None:
    pool = OutputPool()
    first = pool.take(SHAPE, torch.float32)
    pointer = first.data_ptr()
    assert first.shape == SHAPE
    assert first.is_contiguous()
    del first
    assert pool.take(SHAPE, torch.float32).data_ptr() == pointer


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[3:4, ::2],
        lambda tensor: tensor.view(torch.uint8),
        lambda tensor: tensor.T.detach(),
        lambda tensor: tensor.numpy()[5],
        lambda tensor: np.asarray(tensor).reshape(-1)[::7],
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: torch.utils.dlpack.from_dlpack(tensor),
        lambda tensor: tensor.__dlpack__(),
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: torch.nn.Parameter(tensor),
        lambda tensor: {"obs": [tensor.unbind(0)]},
        lambda tensor: (tensor * torch.ones((), requires_grad=True)).grad_fn,
    ],
)
def test_a_block_stays_out_while_anything_that_reads_it_lives(hold) -> None:
    pool = OutputPool()
    tensor = pool.take(SHAPE, torch.float32).fill_(7)
    pointer = tensor.data_ptr()
    held = hold(tensor)
    del tensor
    for _ in range(3):
        other = pool.take(SHAPE, torch.float32).fill_(1)
        assert other.data_ptr() != pointer
    del held
    gc.collect()
    free = {pool.take(SHAPE, torch.float32).data_ptr() for _ in range(1)}
    blocks = [pool.take(SHAPE, torch.float32) for _ in range(3)]
    assert pointer in free | {block.data_ptr() for block in blocks}


def test_of_several_idle_blocks_the_one_used_last_is_taken() -> None:
    pool = OutputPool()
    held = [pool.take(SHAPE, torch.float32) for _ in range(4)]
    del held
    assert len({pool.take(SHAPE, torch.float32).data_ptr() for _ in range(6)}) == 1


def test_sizes_and_dtypes_share_blocks_of_the_same_bytes_only() -> None:
    pool = OutputPool()
    pointer = pool.take(SHAPE, torch.float32).data_ptr()
    larger = pool.take((SHAPE[0] * 2, SHAPE[1]), torch.float32)
    assert larger.data_ptr() != pointer
    assert pool.take((SHAPE[0], SHAPE[1] * 4), torch.uint8).data_ptr() == pointer


def test_blocks_are_aligned_to_a_cache_line() -> None:
    pool = OutputPool()
    assert all(pool.take((n, 1001), torch.float32).data_ptr() % 64 == 0 for n in range(300, 320))


def test_small_and_empty_outputs_do_not_use_the_pool() -> None:
    pool = OutputPool()
    assert pool.take((3,), torch.float32).shape == (3,)
    assert pool.take((0, 5), torch.uint8).shape == (0, 5)
    assert pool.nbytes == 0


def test_what_the_pool_remembers_is_bounded_but_for_two_blocks() -> None:
    block = SHAPE[0] * SHAPE[1] * 4 + 64
    pool = OutputPool(max_bytes=3 * block)
    held = [pool.take(SHAPE, torch.float32).fill_(i) for i in range(10)]
    assert pool.nbytes == 3 * block
    assert len({tensor.data_ptr() for tensor in held}) == 10
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(held))
    assert OutputPool(max_bytes=0).nbytes == 0
    small = OutputPool(max_bytes=0)
    held = [small.take(SHAPE, torch.float32) for _ in range(5)]
    assert small.nbytes == 2 * block
    small.clear()
    assert small.nbytes == 0
    with pytest.raises(ConfigError):
        OutputPool(max_bytes=-1)


def test_threads_never_share_a_block() -> None:
    pool = OutputPool(max_bytes=1 << 23)
    wrong: list[int] = []

    def work(identity: int) -> None:
        previous = pool.take(SHAPE, torch.float32).fill_(identity)
        for turn in range(60):
            value = identity * 1000 + turn
            tensor = pool.take(SHAPE, torch.float32).fill_(value)
            if not bool((tensor == value).all()) or previous[0, 0] not in (identity, value - 1):
                wrong.append(identity)
            previous = tensor

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("missing", [1, 2])
def test_a_held_block_stays_out_where_the_interpreter_counts_fewer_references(monkeypatch, missing) -> None:
    """CPython 3.14 does not count a reference that a local variable lends to a call: counts are smaller there."""
    count = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda thing: count(thing) - missing)
    pool = OutputPool()
    held = pool.take(SHAPE, torch.float32).fill_(7)
    view = pool.take(SHAPE, torch.float32).fill_(8)[5]
    for _ in range(4):
        pool.take(SHAPE, torch.float32).fill_(1)
    assert bool((held == 7).all())
    assert bool((view == 8).all())
    assert pool.nbytes < 4 * held.nbytes, "what nobody holds is used again"
