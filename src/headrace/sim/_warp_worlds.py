"""A set of MuJoCo Warp's worlds: one model, one data, and the graphs that were captured of what runs on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from headrace._device import warp_launches
from headrace.errors import ConfigError

Run = Callable[[Any, Any], None]
"""What to run, given Warp's model and data."""


class Worlds:
    """Owns a data of N worlds and its graphs; ``model`` may share arrays with that of other worlds.

    MuJoCo Warp has no mask for a step, but the first n worlds can run alone, by a data that says ``nworld=n``.
    """

    def __init__(self, warp: Any, device: torch.device, model: Any, data: Any) -> None:
        self._warp = warp
        self._device = device
        self.model = model
        self.data = data
        self._views: dict[str, Tensor] = {}
        self._graphs: dict[Hashable, Any] = {}

    def view(self, name: str) -> Tensor:
        """Return field ``name`` of the data, (N, …), live; matrices are flat, as in MuJoCo."""
        if name not in self._views:
            array = getattr(self.data, name, None)
            if not hasattr(array, "ptr"):
                raise ConfigError(f"field {name!r}: expected an array of MuJoCo Warp's data, got none by that name")
            view: Tensor = self._warp.to_torch(array)
            # MuJoCo keeps 3×3 matrices as nine numbers
            self._views[name] = view.flatten(2) if view.dim() == 4 and view.shape[2:] == (3, 3) else view
        return self._views[name]

    def expand(self, name: str, rows: int) -> Tensor:
        """Give each of ``rows`` worlds its own row of a model's array, (rows, …), live; graphs start anew."""
        shared = getattr(self.model, name)
        first = self._warp.to_torch(shared)[0]
        values = first.expand(rows, *first.shape).clone()
        setattr(self.model, name, self._warp.from_torch(values, dtype=shared.dtype))
        self._graphs.clear()
        return values

    def replay(self, name: Hashable, count: int, run: Run, changed: Iterable[Tensor]) -> None:
        """Run the captured graph of ``run`` on the first ``count`` worlds; the first time, capture it.

        Kernel by kernel a step would cost more than its kernels do, and the host would wait for every iteration of the
        solver.

        Args:
            name: of the graph, with ``count``.
            count: how many worlds.
            run: what is captured.
            changed: what ``run`` writes and may be read: put back after the trial run that compiles kernels.
        """
        key = (name, count)
        if key not in self._graphs:
            self._graphs[key] = self._capture(count, run, list(changed))
        with warp_launches(self._device):
            self._warp.capture_launch(self._graphs[key])

    def _capture(self, count: int, run: Run, changed: list[Tensor]) -> Any:
        data = dataclasses.replace(self.data, nworld=count)
        before = [values.clone() for values in changed]
        with warp_launches(self._device):
            run(self.model, data)
        # CUDA cannot capture the default stream, which torch's current one mostly is: a stream that runs nothing else
        stream = self._warp.Stream(self._warp.device_from_torch(self._device)) if self._device.type == "cuda" else None
        scope = self._warp.ScopedStream(stream) if stream else self._warp.ScopedDevice("cpu")
        with scope, self._warp.ScopedCapture(stream=stream) as capture:
            run(self.model, data)
        for values, saved in zip(changed, before, strict=True):
            values.copy_(saved)
        return capture.graph
