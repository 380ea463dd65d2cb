"""One small Ray cluster for the tests of a process."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Generator

import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@pytest.fixture(scope="session")
def cluster() -> Generator[str]:
    """The address of a cluster that this process is connected to, with room for four workers."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def _collect_pipes() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]  # autouse
    """Collect the pipes of killed workers, which Ray drops without closing them, before another test warns of them."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
