"""What tests of bridges share: nobody and nothing is left behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture
def nobody_left() -> Iterator[None]:
    """No process of this test and no descriptor outlives it."""
    me = psutil.Process()
    before, descriptors = {one.pid for one in me.children(recursive=True)}, me.num_fds()
    yield
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        gc.collect()  # an error's traceback holds the environment and its memory
        left = [one for one in me.children(recursive=True) if one.pid not in before]
        if not left and me.num_fds() <= descriptors:
            return
        time.sleep(0.05)
    raise AssertionError(f"left behind: {left}, {me.num_fds() - descriptors} descriptors")
