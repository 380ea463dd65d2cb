"""Where a result comes from: machine, versions, git state, environment variables. Nothing here costs a running loop."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil

from headrace import __version__
from headrace.bench._schema import GpuDeviceInfo, Hardware, Versions

GB = 2**30
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_CPUINFO = Path("/proc/cpuinfo")
_GIT_SECONDS = 10.0
_PACKAGES = (
    *("envpool", "mujoco-warp", "numba", "onnxruntime", "rl-games", "rsl-rl-lib", "skrl", "stable-baselines3"),
    *("tensordict", "torchrl", "triton", "warp-lang"),
)
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "GOMP_CPU_AFFINITY", "HEADRACE_NUM_THREADS", "KMP_AFFINITY", "MALLOC_ARENA_MAX"),
    *("MKL_NUM_THREADS", "MUJOCO_GL", "NUMBA_DISABLE_JIT", "OMP_NUM_THREADS", "OMP_PROC_BIND"),
    *("OPENBLAS_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "TORCHDYNAMO_DISABLE", "LD_PRELOAD"),
)


class GitState(NamedTuple):
    """Of a project; all None where there is no repository, or no git."""

    commit: str | None
    branch: str | None
    dirty: bool | None


def git_state(folder: Path) -> GitState:
    """The git state of the project that ``folder`` is in."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return GitState(None, None, None)
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
    # a detached head has no branch
    return GitState(commit, None if branch == "HEAD" else branch, None if changes is None else bool(changes))


def load_average() -> tuple[float, float, float] | None:
    """Of 1, 5 and 15 minutes; None where the system does not tell."""
    try:
        return os.getloadavg()
    except OSError:
        return None


def environment_variables() -> dict[str, str]:
    """Those variables that change speed or results, as far as they are set."""
    return {name: os.environ[name] for name in sorted(_VARIABLES) if name in os.environ}


def versions(git: GitState) -> Versions:
    """Installed versions, read without importing anything."""
    found = {name: _version(name) for name in _PACKAGES}
    return Versions(
        headrace=__version__,
        python=platform.python_version(),
        torch=_version("torch"),
        numpy=_version("numpy"),
        mujoco=_version("mujoco"),
        gymnasium=_version("gymnasium"),
        packages={name: version for name, version in found.items() if version is not None},
        git_commit=git.commit,
        git_branch=git.branch,
        git_dirty=git.dirty,
    )


def hardware(load: tuple[float, float, float] | None, *, gpus: bool = True) -> Hardware:
    """The machine. GPUs are those that torch sees, which is imported for it; ``load`` is that of the moment the run
    began."""
    return Hardware(
        hostname=socket.gethostname(),
        gpu_devices=_gpus() if gpus else [],
        cpu_name=_cpu_name(),
        cpu_count=os.cpu_count() or 1,
        ram_gb=round(psutil.virtual_memory().total / GB, 2),
        cpu_physical=psutil.cpu_count(logical=False),
        cpu_usable=len(os.sched_getaffinity(0)),
        cpu_governor=_GOVERNOR.read_text().strip() if _GOVERNOR.is_file() else None,
        load_average=load,
        platform=platform.platform(),
    )


def _gpus() -> list[GpuDeviceInfo]:
    import torch

    if not torch.cuda.is_available():
        return []
    found: list[GpuDeviceInfo] = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(
            GpuDeviceInfo(
                name=about.name,
                mem_gb=round(about.total_memory / GB, 2),
                compute_cap=f"{about.major}.{about.minor}",
            )
        )
    return found


def _cpu_name() -> str:
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
