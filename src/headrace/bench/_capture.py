"""Where a result comes from: machine, versions, git state, environment variables. Nothing here costs a running loop."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil
from pydantic import JsonValue

from headrace import __version__
from headrace.adapters._library import library
from headrace.bench._schema import GpuDeviceInfo, Hardware, LibraryDescriptor, Versions

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


def environment_variables() -> dict[str, str]:
    """Those variables that change speed or results, as far as they are set."""
    return {name: os.environ[name] for name in sorted(_VARIABLES) if name in os.environ}


def versions(folder: Path) -> Versions:
    """Installed versions, read without importing anything, and the git state of the project that ``folder`` is in: null
    where there is no repository, or no git."""
    commit = _git(folder, "rev-parse", "HEAD")
    branch = commit and _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
    changes = commit and _git(folder, "status", "--porcelain", "--untracked-files=no")
    found = {name: _version(name) for name in _PACKAGES}
    return Versions(
        headrace=__version__,
        python=platform.python_version(),
        torch=_version("torch"),
        numpy=_version("numpy"),
        mujoco=_version("mujoco"),
        gymnasium=_version("gymnasium"),
        packages={name: version for name, version in found.items() if version is not None},
        git_commit=commit,
        git_branch=None if branch == "HEAD" else branch,  # a detached head has no branch
        git_dirty=None if changes is None else bool(changes),
    )


def hardware() -> Hardware:
    """The machine and its load as they are now, without its GPUs: finding those imports torch."""
    try:
        load = os.getloadavg()
    except OSError:  # the system does not tell
        load = None
    return Hardware(
        hostname=socket.gethostname(),
        gpu_devices=[],
        cpu_name=_cpu_name(),
        cpu_count=os.cpu_count() or 1,
        ram_gb=round(psutil.virtual_memory().total / GB, 2),
        cpu_physical=psutil.cpu_count(logical=False),
        cpu_usable=len(os.sched_getaffinity(0)),
        cpu_governor=_GOVERNOR.read_text().strip() if _GOVERNOR.is_file() else None,
        load_average=load,
        platform=platform.platform(),
    )


def gpu_devices() -> list[GpuDeviceInfo]:
    """The GPUs that torch sees."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [
        GpuDeviceInfo(name=gpu.name, mem_gb=round(gpu.total_memory / GB, 2), compute_cap=f"{gpu.major}.{gpu.minor}")
        for gpu in seen
    ]


def describe_library(
    name: str, *, algorithm: str | None = None, settings: Mapping[str, JsonValue] | None = None
) -> LibraryDescriptor:
    """A descriptor with the installed version, read without importing the library; null where it is not installed.

    With ``settings`` it says where the library computes something else than they suggest.
    """
    spec = library(name)
    return LibraryDescriptor(
        name=name,
        version=_version(spec.distribution),
        algorithm=algorithm,
        settings=dict(settings or {}),
        differences=[] if settings is None else list(spec.differences),
    )


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
