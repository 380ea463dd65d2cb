"""``headrace doctor --gpu`` and its comparisons, on the pretend device."""

from __future__ import annotations

import pytest
import torch

from headrace.cli.main import main
from headrace.testing import parts as gpu
from pretend_cuda import pretend_cuda


def test_every_comparison_holds_on_the_pretend_device() -> None:
    with pretend_cuda(warp=True):
        checks = gpu.check_gpu("cuda:0")
    assert [check for check in checks if not check.ok] == []
    assert len(checks) == 2


def test_a_comparison_that_fails_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.zeros(2, device=device), torch.tensor([0.0, 0.5]))]

    def broken(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(gpu, "_COMPARISONS", [("zeros", 1e-3, wrong), ("kernels", 0.0, broken)])
    first, second = gpu.check_gpu("cpu")
    assert first == ("zeros", False, "differs by 5.0e-01; expected within 1e-03")
    assert second == ("kernels", False, "RuntimeError: no kernel image")


def test_without_a_gpu_the_doctor_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu"]) == 2
    assert "no CUDA device" in capsys.readouterr().out
