"""No test of this folder may leave a thread, a process or a socket behind."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Generator
from multiprocessing import resource_tracker

import psutil
import pytest


def _open_things() -> tuple[int, int, int]:
    resource_tracker.ensure_running()  # the first process engine of a run starts it, and it stays
    sockets = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            sockets += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return threading.active_count(), len(psutil.Process().children()), sockets


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Generator[None]:
    before = _open_things()
    yield
    deadline = time.monotonic() + 10.0
    while any(now > then for now, then in zip(_open_things(), before, strict=True)):  # closing takes a moment
        assert time.monotonic() < deadline, f"left open (threads, processes, sockets): {_open_things()}, not {before}"
        time.sleep(0.01)
