"""A thread that samples what a run uses: CPU, memory, GPU. What it cannot sample it says, once, and leaves out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import psutil

from headrace.bench._capture import GB
from headrace.bench._schema import SAMPLED, Resources
from headrace.bench._statistic import Statistic
from headrace.errors import ConfigError

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
        processes = _Processes()
        usual: dict[str, Gauge] = {
            "cpu_util_pct": processes.cpu_percent,
            "ram_gb": processes.memory_gb,
            "gpu_util_pct": lambda: _gpu(lambda cuda, device: float(cuda.utilization(device))),
            "gpu_mem_gb": lambda: _gpu(_used_gb),
        }
        self._gauges = usual if gauges is None else dict(gauges)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.clear()

    def start(self) -> None:
        """Begin to sample. The first sample is taken here, by the caller."""
        self._sample()
        self._thread = threading.Thread(target=self._run, name="headrace-monitor", daemon=True)
        self._thread.start()

    def clear(self) -> None:
        """Forget what was sampled so far: what is measured begins now."""
        self._samples: dict[str, list[float]] = {name: [] for name in SAMPLED}

    def stop(self) -> None:
        """Take a last sample and end the thread. A second call does nothing."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self._sample()

    def resources(self) -> Resources:
        """What was sampled so far."""
        found = {name: Statistic.of(values, unit=SAMPLED[name]) for name, values in self._samples.items()}
        return Resources(**found, sample_interval_s=self.interval, problems=list(self.problems))

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
    """What ``read`` finds, given ``torch.cuda`` and the first device with torch's memory on it; None before the program
    itself has loaded torch and begun to use one.

    Which device is current is no answer: every thread has its own, and this one never chose.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if torch is None or cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return None
    used = [index for index in range(cuda.device_count()) if cuda.memory_reserved(index)]
    return read(cuda, torch.device("cuda", used[0])) if used else None


def _used_gb(cuda: Any, device: Any) -> float:
    free, total = cuda.mem_get_info(device)
    return (total - free) / GB
