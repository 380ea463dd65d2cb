"""Where results come from, and what runs use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import headrace
from headrace.bench import capture
from headrace.bench.capture import GB, ResourceMonitor, environment_variables, gpu_devices, hardware, versions
from headrace.errors import ConfigError
from headrace.libraries.registry import BUILT_IN, library


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.com"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_git_state_is_that_of_the_users_project(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    found = versions(tmp_path)
    assert (found.git_commit, found.git_branch, found.git_dirty) == (commit, "trunk", False)
    (tmp_path / "a").write_text("2")
    found = versions(tmp_path)
    assert (found.git_commit, found.git_branch, found.git_dirty) == (commit, "trunk", True)
    git(tmp_path, "checkout", "-q", "--detach")
    assert versions(tmp_path).git_branch is None


def test_a_folder_without_git_has_no_state(tmp_path: Path) -> None:
    found = versions(tmp_path)
    assert (found.git_commit, found.git_branch, found.git_dirty) == (None, None, None)


def test_versions_and_hardware_name_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 2.0, 3.0))
    found = versions(Path.cwd())
    assert found.headrace == headrace.__version__
    assert found.torch is not None
    assert found.torch.startswith("2.")
    assert found.packages["numba"]
    machine = hardware()
    assert machine.cpu_count == os.cpu_count()
    assert machine.cpu_name
    assert machine.ram_gb > 0.5
    assert machine.load_average == (1.0, 2.0, 3.0)
    assert len(gpu_devices()) == torch.cuda.device_count()


def test_the_version_of_every_built_in_library_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    known = versions(Path.cwd()).packages
    assert {"rl-games", "rsl-rl-lib", "skrl", "stable-baselines3"} <= set(known)
    assert "headrace" not in known
    assert list(known) == sorted(known)
    added = replace(library("sb3"), distribution="pytest")
    monkeypatch.setattr(capture, "library", {**{name: library(name) for name in BUILT_IN}, "sb3": added}.__getitem__)
    assert versions(Path.cwd()).packages["pytest"] == pytest.__version__


def test_variables_that_matter_are_kept_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    found = environment_variables()
    assert found["OMP_NUM_THREADS"] == "3"
    assert "SECRET_TOKEN" not in found
    assert "MUJOCO_GL" not in found


def test_the_monitor_sees_the_processor_and_the_memory_of_children_too() -> None:
    own = ResourceMonitor(0.05)
    own.start()
    alone = own.resources().ram_gb
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(200_000_000); print(flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert child.stdout is not None
        child.stdout.readline()
        begin = time.process_time()
        while time.process_time() - begin < 0.2:
            pass
    finally:
        own.stop()
        child.communicate(b"\n")
    found = own.resources()
    assert alone is not None
    assert found.ram_gb is not None
    assert found.ram_gb.peak > alone.mean + 0.18
    assert found.cpu_util_pct is not None
    assert found.cpu_util_pct.peak > 1.0
    assert found.problems == []


def test_a_gauge_that_fails_is_told_once_and_the_others_go_on() -> None:
    asked = []

    def broken() -> float:
        asked.append(1)
        raise RuntimeError("no driver")

    monitor = ResourceMonitor(0.01, gauges={"gpu_util_pct": broken, "ram_gb": lambda: 2.0, "gpu_mem_gb": lambda: None})
    monitor.start()
    time.sleep(0.05)
    monitor.stop()
    found = monitor.resources()
    assert found.problems == ["gpu_util_pct: RuntimeError: no driver"]
    assert len(asked) == 1
    assert found.gpu_util_pct is None
    assert found.gpu_mem_gb is None, "not there is null, not 0"
    assert found.ram_gb is not None
    assert found.ram_gb.n >= 2
    monitor.stop()


def test_an_interval_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        ResourceMonitor(0.0)


def test_gpu_gauges_follow_the_device_that_is_used_and_say_when_nvml_is_absent(monkeypatch) -> None:
    def no_nvml(_device: torch.device) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed or it can't be imported.")

    cuda = torch.cuda
    for name, value in (
        ("is_available", lambda: True),
        ("is_initialized", lambda: True),
        ("device_count", lambda: 2),
        ("memory_reserved", lambda index: 4096 * index),
        ("utilization", no_nvml),
        ("mem_get_info", lambda device: (3 << 30, (3 + device.index) << 30)),
    ):
        monkeypatch.setattr(cuda, name, value)
    monitor = ResourceMonitor(interval=60)
    monitor.start()
    monitor.stop()
    found = monitor.resources()
    assert found.gpu_mem_gb is not None
    assert found.gpu_mem_gb.peak == pytest.approx((1 << 30) / GB)
    assert found.gpu_util_pct is None
    assert found.problems == [
        "gpu_util_pct: ModuleNotFoundError: nvidia-ml-py does not seem to be installed or it can't be imported."
    ]


def test_gpu_gauges_read_nothing_before_the_program_uses_a_device() -> None:
    monitor = ResourceMonitor(interval=60)
    monitor.start()
    monitor.stop()
    found = monitor.resources()
    assert (found.gpu_util_pct, found.gpu_mem_gb, found.problems) == (None, None, [])
