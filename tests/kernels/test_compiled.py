"""The settings that every kernel shares."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
torch.set_num_threads(1)
from headrace.vision import normalize_image
normalize_image(torch.zeros((64, 64, 64, 3), dtype=torch.uint8))
print(torch.get_num_threads())
"""


def test_parallel_kernels_leave_torchs_number_of_threads_alone() -> None:
    """numba's OpenMP layer sets the number of threads for torch's OpenMP as well, once, when it starts."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_NUM_THREADS": "2"},
    )
    assert run.stdout.split() == ["1"], run.stderr
