"""The Triton layers compile to binaries for real architectures, and fit any card's shared memory. Needs no GPU."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.learning import GRU
from headrace.learning import _backends as backends
from headrace.learning import _recurrent as recurrent
from headrace.learning._triton_layers import SHARED_BYTES
from pretend_cuda import pretend_cuda

# the least that a card of the architecture gives a block: A100 163 KiB, RTX 40 99 KiB, H100 227 KiB
LIMITS = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
SCRIPT = Path(__file__).parent / "compile_triton.py"


def compiled(architecture: int, *sizes: int) -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(architecture), *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(records: list[dict[str, Any]], count: int) -> None:
    assert len(records) == count
    for record in records:
        assert record["binary"] > 0, record
        assert record["shared"] <= SHARED_BYTES <= min(LIMITS.values()), record
        # the state of a step is read by the next one: behind a barrier, and not by a copy that may overtake it
        assert record["async_copies"] == 0, record
        assert record["barriers"] > 0, record


def test_the_layers_compile_for_an_a100_within_the_shared_memory_of_every_card() -> None:
    check(compiled(80, 128), 4)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", LIMITS)
def test_the_layers_compile_for_three_architectures_and_hidden_sizes_from_32_to_512(architecture: int) -> None:
    check(compiled(architecture, 32, 64, 100, 128, 256, 512), 24)


def auto_times(monkeypatch: pytest.MonkeyPatch, shared: int, triton: float | Exception) -> str:
    """What ``auto`` chooses on a pretended card where scan takes 2, packed 3 and triton as given."""
    monkeypatch.setattr(recurrent, "_measured", {})

    def seconds(name: str, *_: object) -> float:
        if name == "triton" and isinstance(triton, Exception):
            raise triton
        return {"scan": 2.0, "packed": 3.0, "triton": triton}[name]  # type: ignore[dict-item]  # checked above

    monkeypatch.setattr(recurrent, "_seconds", seconds)
    # not run on the pretended card, which has no kernels
    monkeypatch.setitem(recurrent._RUNNERS, "triton", backends.run_scan)
    properties = SimpleNamespace(shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with pretend_cuda(), torch.no_grad():
        GRU(3, 5, device="cuda")(torch.zeros(2, 4, 3, device="cuda"))
    (choice,) = recurrent._measured.values()
    return choice


def test_auto_takes_triton_where_it_is_quickest(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert auto_times(monkeypatch, 99 << 10, 1.0) == "triton"
    assert auto_times(monkeypatch, 99 << 10, 9.0) == "scan"


@pytest.mark.parametrize(
    ("shared", "error", "reason"),
    [
        (16 << 10, None, "49,152 bytes of shared memory, the device gives 16,384"),
        (99 << 10, "out of resources", "OutOfResources: out of resource: shared memory"),
        (99 << 10, RuntimeError("Failed to find C compiler"), "RuntimeError: Failed to find C compiler"),
    ],
)
def test_auto_falls_back_with_a_logged_reason_where_triton_cannot_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shared: int, error: object, reason: str
) -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    if error == "out of resources":
        error = errors.OutOfResources(401408, 101376, "shared memory")
    with caplog.at_level(logging.WARNING, "headrace.learning"):
        assert auto_times(monkeypatch, shared, error if isinstance(error, Exception) else 1.0) == "scan"
    assert reason in caplog.text
    assert "triton backend is left out on cuda:0" in caplog.text
