from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

from headrace import kernel_threads, set_kernel_threads


@pytest.fixture
def use_threads() -> Generator[Callable[[int], None]]:
    """Sets how many threads kernels use, until the end of the test."""
    before = kernel_threads()
    yield set_kernel_threads
    set_kernel_threads(before)
