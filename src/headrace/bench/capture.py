"""Where a result comes from, and what it used: machine, versions, git state, environment variables; CPU, memory, GPU.

The first cost a running loop nothing. The others are sampled by a thread; what it cannot sample it says, once, and
leaves out.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from pydantic import JsonValue

from headrace import __version__
from headrace._kernels.threads import available_cores
from headrace.bench.schema import SAMPLED, GpuDeviceInfo, Hardware, LibraryDescriptor, Resources, Statistic, Versions
from headrace.errors import ConfigError, installed_version
from headrace.libraries.registry import BUILT_IN, library

GB = 2**30
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_CPUINFO = Path("/proc/cpuinfo")
_GIT_SECONDS = 10.0
_DIRTY_FILES = 50
_PACKAGES = (*("envpool", "mujoco-warp", "numba", "onnxruntime", "tensordict", "torchrl", "warp-lang"),)
"""Recorded besides the RL libraries that there are."""
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
    changes = None if commit is None else _git(folder, "status", "--porcelain")
    dirty = [line[3:] for line in (changes or "").splitlines()]
    rl = [spec.distribution for spec in map(library, BUILT_IN) if spec.module is not None]
    found = {name: installed_version(name) for name in sorted((*_PACKAGES, *rl))}
    return Versions(
        headrace=__version__,
        python=platform.python_version(),
        **{name: installed_version(name) for name in ("torch", "numpy", "mujoco", "gymnasium")},
        packages={name: version for name, version in found.items() if version is not None},
        git_commit=commit,
        git_branch=None if branch == "HEAD" else branch,  # a detached head has no branch
        git_dirty=None if changes is None else bool(dirty),
        git_dirty_files=None if changes is None else dirty[:_DIRTY_FILES],
        headrace_commit=_source_commit(),
    )


def _source_commit() -> str | None:
    """Return the commit of the checkout that headrace is imported from, with ``+`` if it has changes; None elsewhere.

    An editable installation is such a checkout; its version says little.
    """
    source = Path(__file__).resolve().parents[3]
    commit = _git(source, "rev-parse", "HEAD") if (source / ".git").exists() else None
    return commit and commit + ("+" if _git(source, "status", "--porcelain", "--", "src") else "")


def hardware() -> Hardware:
    """Return the machine and its load as they are now, without its GPUs: finding those imports torch."""
    return Hardware(
        hostname=socket.gethostname(),
        gpu_devices=[],
        cpu_name=_cpu_name(),
        cpu_count=os.cpu_count() or 1,
        ram_gb=round(psutil.virtual_memory().total / GB, 2),
        cpu_physical=psutil.cpu_count(logical=False),
        cpu_usable=available_cores(),
        cpu_governor=_GOVERNOR.read_text().strip() if _GOVERNOR.is_file() else None,
        load_average=os.getloadavg(),
        platform=platform.platform(),
    )


def gpu_devices() -> list[GpuDeviceInfo]:
    """Return the GPUs that torch sees."""
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
    """Return a descriptor with the installed version, read without importing the library; null where it is not
    installed.

    With ``settings`` it says where the library computes something else than they suggest.
    """
    spec = library(name)
    return LibraryDescriptor(
        name=name,
        version=installed_version(spec.distribution),
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


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


Gauge = Callable[[], float | None]
"""Reads one number; None for "not now", such as a GPU before torch is loaded."""


class ResourceMonitor:
    """Samples CPU and memory of this process and its children, and the GPU where there is one, once an interval.

    A gauge that raises is not asked again; its error is kept in ``problems`` and written into the bundle.
    """

    def __init__(self, interval: float = 1.0, gauges: dict[str, Gauge] | None = None) -> None:
        """Prepare; ``start`` begins.

        Args:
            interval: seconds between samples.
            gauges: name of a field of :class:`Resources` → how to read it; the usual four if None.
        """
        if not interval > 0:
            raise ConfigError(f"monitor interval: expected seconds above 0, got {interval}")
        self.interval = interval
        self.problems: list[str] = []
        self._processes = processes = _Processes()
        self._counter: InstructionCounter | None = None
        usual: dict[str, Gauge] = {
            "cpu_util_pct": processes.cpu_percent,
            "ram_gb": processes.memory_gb,
            "gpu_util_pct": lambda: _gpu(lambda cuda, device: float(cuda.utilization(device))),
            "gpu_mem_gb": lambda: _gpu(_read_used_gb),
        }
        self._gauges = usual if gauges is None else dict(gauges)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.clear()

    def start(self) -> None:
        """Begin to sample. The first sample is taken here, by the caller."""
        self._counter = InstructionCounter()  # before the threads of torch and of kernels, which it then counts
        self._sample()
        self._thread = threading.Thread(target=self._run, name="headrace-monitor", daemon=True)
        self._thread.start()

    def clear(self) -> None:
        """Forget what was sampled so far: what is measured begins now."""
        self._samples: dict[str, list[float]] = {name: [] for name in SAMPLED}
        self._began = self._work()
        self._spent: tuple[float, int | None] = (0.0, None)

    def stop(self) -> None:
        """Take a last sample and end the thread. A second call does nothing."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self._sample()
            (before, first), (now, last) = self._began, self._work()
            self._spent = (now - before, None if first is None or last is None else last - first)
            if self._counter is not None:
                self._counter.close()

    def resources(self) -> Resources:
        """Return what was sampled so far."""
        found = {name: Statistic.of(values, unit=SAMPLED[name]) for name, values in self._samples.items()}
        seconds, instructions = self._spent
        return Resources(
            **found,
            sample_interval_s=self.interval,
            problems=list(self.problems),
            cpu_s=seconds or None,
            instructions=instructions,
        )

    def _work(self) -> tuple[float, int | None]:
        """Return the processor seconds and the instructions of this process so far."""
        return self._processes.cpu_seconds(), None if self._counter is None else self._counter.read()

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self._sample()

    def _sample(self) -> None:
        for name, gauge in list(self._gauges.items()):
            try:
                value = gauge()
            except Exception as error:  # noqa: BLE001  # whatever a driver raises must end the gauge, not the run
                self.problems.append(f"{name}: {type(error).__name__}: {error}")
                del self._gauges[name]
            else:
                if value is not None:
                    self._samples[name].append(value)


class _Processes:
    """This process and its children, which come and go."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._known: dict[int, psutil.Process] = {}
        self._asked = False

    def cpu_percent(self) -> float | None:
        """Since the last call, percent of one core; None at the first call, which has no last one."""
        now = {child.pid: child for child in self._own.children(recursive=True)}
        self._known = {pid: self._known.get(pid, child) for pid, child in now.items()}
        total = self._sum(lambda process: process.cpu_percent(None))
        asked, self._asked = self._asked, True
        return total if asked else None

    def cpu_seconds(self) -> float:
        """Return the processor time in user space and kernel, all threads; of children as of the last sample."""
        return self._sum(lambda process: sum(process.cpu_times()[:2]))

    def memory_gb(self) -> float:
        """Resident memory; pages that processes share are counted in each. Children as of the last ``cpu_percent``:
        looking for them is what a sample costs most."""
        return self._sum(lambda process: process.memory_info().rss) / GB

    def _sum(self, read: Callable[[psutil.Process], float]) -> float:
        total = read(self._own)
        for child in list(self._known.values()):
            try:
                total += read(child)
            except psutil.NoSuchProcess:  # it ended between the listing and the question
                del self._known[child.pid]
        return total


def _gpu(read: Callable[[Any, Any], float]) -> float | None:
    """Return what ``read`` finds, given ``torch.cuda`` and the first device with torch's memory on it; None before the
    program itself has loaded torch and begun to use one.

    Which device is current is no answer: every thread has its own, and this one never chose.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if torch is None or cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return None
    used = [index for index in range(cuda.device_count()) if cuda.memory_reserved(index)]
    return read(cuda, torch.device("cuda", used[0])) if used else None


def _read_used_gb(cuda: Any, device: Any) -> float:
    free, total = cuda.mem_get_info(device)
    return (total - free) / GB


_SYSCALLS = {"x86_64": 298, "aarch64": 241}
"""Number of ``perf_event_open``, for which C libraries have no function."""
_ATTRIBUTE_BYTES = 128
_INSTRUCTIONS = 1
_INHERIT, _NO_KERNEL, _NO_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 8


class InstructionCounter:
    """Counts instructions in user space, of this thread and of threads and processes that begin after it was made."""

    def __init__(self) -> None:
        attribute = bytearray(_ATTRIBUTE_BYTES)
        struct.pack_into("=IIQ", attribute, 0, 0, _ATTRIBUTE_BYTES, _INSTRUCTIONS)
        struct.pack_into("=Q", attribute, 40, _INHERIT | _NO_KERNEL | _NO_HYPERVISOR)
        number = _SYSCALLS.get(platform.machine())
        argument = (ctypes.c_char * _ATTRIBUTE_BYTES).from_buffer(attribute)
        of = (0, -1, -1)  # this thread, on any core, in no group of counters
        self._file = -1 if number is None else ctypes.CDLL(None).syscall(number, argument, *of, _CLOSE_ON_EXEC)

    def read(self) -> int | None:
        """Return the instructions so far; None where the machine does not count them for us."""
        if self._file < 0:
            return None
        return int.from_bytes(os.read(self._file, 8), "little")

    def close(self) -> None:
        """Give the counter back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
