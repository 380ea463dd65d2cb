"""The byte kernels against plain numpy indexing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.replay import row_space as kernels


class Space:
    """A sharded row space in plain numpy arrays, with its contents known."""

    def __init__(self, rows: int, row_bytes: int, shift: int) -> None:
        self.shift, self.row_bytes = shift, row_bytes
        count = -(-rows // (1 << shift))
        self.shards = [np.zeros((1 << shift, row_bytes), np.uint8) for _ in range(count)]
        self.place = (np.array([shard.ctypes.data for shard in self.shards], np.int64), shift, row_bytes)

    def fill(self) -> None:
        for number, shard in enumerate(self.shards):
            shard[:] = np.random.default_rng(number).integers(0, 256, shard.shape, dtype=np.uint8)

    @property
    def content(self) -> np.ndarray:
        return np.concatenate(self.shards)


@settings(deadline=None, max_examples=60)
@given(
    row_bytes=st.sampled_from([1, 3, 8, 24, 7056]),
    shift=st.integers(0, 4),
    samples=st.integers(0, 120),
    frames=st.integers(1, 9),
    interleaved=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gather_equals_numpy_indexing(row_bytes, shift, samples, frames, interleaved, seed):
    space = Space(40, row_bytes, shift)
    space.fill()
    rows = np.random.default_rng(seed).integers(-1, 40, (samples, frames))
    outer = {1: 1, 3: 3, 8: 2, 24: 24, 7056: 84}[row_bytes] if interleaved else 1
    out = np.full(samples * frames * row_bytes, 77, np.uint8)
    kernels.gather(space.place, rows, outer, out)
    expected = np.where((rows >= 0)[..., None], space.content[rows], 0)
    expected = expected.reshape(samples, frames, outer, row_bytes // outer).swapaxes(1, 2)
    assert np.array_equal(out, expected.reshape(-1))


@pytest.mark.parametrize("row_bytes", [5, 1_200_000])
def test_scatter_writes_strided_sources_and_nothing_else(row_bytes):
    space = Space(16, row_bytes, 2)
    source = np.random.default_rng(0).integers(0, 256, (6, row_bytes + 11), dtype=np.uint8)
    rows, index = np.array([3, 9, 14, 0]), np.array([5, 0, 2, 1])
    kernels.scatter(space.place, rows, (source.ctypes.data, source.strides[0], index))
    expected = np.zeros((16, row_bytes), np.uint8)
    expected[rows] = source[index, :row_bytes]
    assert np.array_equal(space.content, expected)


@pytest.mark.parametrize(
    ("frames", "row_bytes", "outer"),
    [(3, 100, 1), (3, 100, 5), (3, 300_000, 1), (3, 300_000, 5), (4, 100, 100), (4, 300, 100), (3, 100, 100)],
)
@pytest.mark.parametrize("zero", [False, True])
def test_differ_sees_one_changed_byte_and_keeps_what_is_set(frames, row_bytes, outer, zero):
    space = Space(8, row_bytes, 3)
    space.fill()
    columns = [np.arange(8), np.arange(8)[::-1], np.full(8, -1 if zero else 4), np.arange(8)]
    rows = np.stack(columns[:frames], 1)
    source = np.empty((8, frames * row_bytes), np.uint8)
    kernels.gather(space.place, rows, outer, source.reshape(-1))
    for byte in (0, row_bytes + 1, 2 * row_bytes + 2, frames * row_bytes - 1):
        changed = source.copy()
        changed[5, byte] ^= 1
        out = np.zeros(8, np.bool_)
        out[2] = True
        kernels.differ(space.place, rows, outer, (changed.ctypes.data, frames * row_bytes, np.arange(8)), out)
        assert out.nonzero()[0].tolist() == [2, 5]


def test_move_copies_rows_across_shards():
    space = Space(8, 10, 1)
    space.fill()
    before = space.content
    kernels.move(space.place, np.array([0, 7]), np.array([5, 2]))
    before[[0, 7]] = before[[5, 2]]
    assert np.array_equal(space.content, before)
