from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.recording import _episode_file as block_file
from headrace.recording._episode_file import BUFFER_BYTES, BlockBuffer, BlockFile


def is_direct(handle: int) -> bool:
    return bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT)


def some_bytes(size: int) -> NDArray[np.uint8]:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


@contextlib.contextmanager
def block_file_at(path: Path, buffer: BlockBuffer | None = None) -> Iterator[BlockFile]:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with BlockFile(handle, buffer or BlockBuffer()) as file:
            yield file
    finally:
        os.close(handle)


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (0, 1),
        (4096,),
        (131_071, 1),
        (131_072, 4095, 7),
        (BUFFER_BYTES,),
        (BUFFER_BYTES - 1, 2),
        (100, 3 * BUFFER_BYTES + 5_000, 61_440),
    ],
)
def test_the_file_is_the_pieces_one_after_the_other(tmp_path, sizes):
    pieces = [some_bytes(size) for size in sizes]
    buffer = BlockBuffer()
    buffer.bytes[:] = 255  # what an earlier file left behind
    with block_file_at(tmp_path / "x", buffer) as file:
        for piece in pieces:
            file.write(piece)
    whole = b"".join(piece.tobytes() for piece in pieces)
    assert (tmp_path / "x").read_bytes() == whole
    assert file.size == len(whole)


def test_large_blocks_go_past_the_page_cache_and_nothing_else_does(tmp_path, monkeypatch):
    directly: list[tuple[bool, int]] = []
    write = os.write

    def watched(handle, data):
        directly.append((is_direct(handle), len(data)))
        return write(handle, data)

    monkeypatch.setattr(block_file.os, "write", watched)
    with block_file_at(tmp_path / "x") as file:
        if not file._set_direct(True):
            pytest.skip("the file system of the temporary folder has no direct writes")
        file._set_direct(False)
        file.write(some_bytes(BUFFER_BYTES + 200_000))
    assert directly == [(True, BUFFER_BYTES), (True, 196_608), (False, 3_392)]


@pytest.mark.parametrize("refused", ["the mode", "the write"])
def test_a_file_system_without_direct_writes_gets_the_same_bytes(tmp_path, monkeypatch, refused):
    content = some_bytes(BUFFER_BYTES + 300_000)

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    if refused == "the mode":
        monkeypatch.setattr(block_file.BlockFile, "_set_direct", lambda *_: False)
    else:
        write = os.write
        monkeypatch.setattr(
            block_file.os, "write", lambda handle, data: refuse() if is_direct(handle) else write(handle, data)
        )
    with block_file_at(tmp_path / "x") as file:
        file.write(content[:70_001])
        file.write(content[70_001:])
    assert (tmp_path / "x").read_bytes() == content.tobytes()


def test_a_block_that_is_taken_in_part_is_gone_on_with_or_says_why_not(tmp_path):
    content = some_bytes(BUFFER_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # in the middle of a block of the disk: a direct write cannot end there
    resource.setrlimit(resource.RLIMIT_FSIZE, (BUFFER_BYTES // 2 + 100, hard))
    try:
        with pytest.raises(OSError, match="too large"), block_file_at(tmp_path / "x") as file:
            file.write(content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept = (tmp_path / "x").read_bytes()
    assert kept == content[: len(kept)].tobytes()


@pytest.mark.parametrize("nbytes", [4096, 8192, 1 << 20])
def test_elements_of_any_stride_and_size_come_in_order_whatever_the_buffer(tmp_path, nbytes):
    rows = some_bytes(40 * 1000).view([("a", "V3"), ("b", "V37")])
    pieces = [rows["a"], rows["b"], rows["b"][::2], np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1), rows["a"][:0]]
    with block_file_at(tmp_path / "x", BlockBuffer(nbytes)) as file:
        for piece in pieces:
            file.write(piece)
    assert (tmp_path / "x").read_bytes() == b"".join(piece.tobytes() for piece in pieces)


def test_bytes_that_were_left_out_are_filled_in_later(tmp_path):
    with block_file_at(tmp_path / "x", BlockBuffer(8192)) as file:
        file.write(some_bytes(5000))
        gap = file.take(10, 4000)
        assert gap is not None
        file.write(some_bytes(4000))
        assert bytes(file.newest(4000)) == some_bytes(4000).tobytes()
        gap[:] = b"0123456789"
        assert file.take(10, 8183) is None
        file.write(some_bytes(9000))
    whole = some_bytes(5000).tobytes() + b"0123456789" + some_bytes(4000).tobytes() + some_bytes(9000).tobytes()
    assert (tmp_path / "x").read_bytes() == whole
