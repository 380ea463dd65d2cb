"""One small Ray cluster for the tests of a process."""

from __future__ import annotations

import os
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
