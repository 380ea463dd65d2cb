"""Static layers: pictures of what never moves before a camera that never moves, drawn once and kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.sim.camera._render_scene import I32, RenderRows
from headrace.sim.camera.camera import CameraFrames, CameraSpec, DataType

MOST_BYTES = 64 << 20
"""What the layers of one camera may hold; the one unused for longest makes room."""
_REMEMBERED = 4096


class Under(NamedTuple):
    """What n rows are drawn over: pictures of what never moves."""

    frames: CameraFrames
    """P of them, with depth."""
    stamps: NDArray[np.int64]
    """(P,): a number that changes when a picture is replaced."""
    of_row: I32
    """(n,): the picture under each row, or -1 for none."""


class StaticLayers:
    """The layers of one camera: pictures of what never moves before a camera that never moves, drawn once and kept.

    A layer holds depths, colors, ids and normals of the solid geoms that belong to the world. It belongs to the exact
    bits of everything that it was drawn from (those geoms, the camera, the lights, their looks): a row whose bits
    differ has another layer or none, so that a layer can never be wrong. Environments with looks of their own have
    their own layers, made when the same looks come a second time.
    """

    def __init__(self, spec: CameraSpec, static: int) -> None:
        self._static = static
        kinds: list[DataType] = ["depth", *("rgb" if kind == "gray" else kind for kind in spec.data_types)]
        self._spec = replace(spec, data_types=tuple(dict.fromkeys(kinds)))
        one = CameraFrames.empty(self._spec, 1)
        self._most = max(1, MOST_BYTES // sum(getattr(one, kind).nbytes for kind in self._spec.data_types))
        self.frames = CameraFrames.empty(self._spec, 0)
        self.stamps = np.zeros(0, np.int64)
        """(P,): a number that changes when a layer is replaced."""
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._drawn = 0

    def find(self, rows: RenderRows, draw: Callable[[RenderRows, CameraFrames], None]) -> Under | None:
        """Return the layer of each row, None where no row has one; ``draw`` makes new ones."""
        n, static = len(rows.camera_pos), self._static
        seen = (
            *(rows.geom_pos[:, :static], rows.geom_mat[:, :static], rows.rgba[:, :static], rows.sizes[:, :static]),
            *(rows.camera_pos, rows.camera_mat, rows.light_pos, rows.light_dir, rows.diffuse),
        )
        keys = np.concatenate([np.broadcast_to(part, (n, *part.shape[1:])).reshape(n, -1) for part in seen], axis=1)
        if n > 1 and bool((keys == keys[0]).all()):
            owners = {keys[0].tobytes(): np.arange(n)}
        else:
            lists: dict[bytes, list[int]] = {}
            for i in range(n):
                lists.setdefault(keys[i].tobytes(), []).append(i)
            owners = {key: np.array(rows) for key, rows in lists.items()}
        found = np.full(n, -1, np.int32)
        new: list[bytes] = []
        for key, members in owners.items():
            if key in self._places:
                self._places.move_to_end(key)
            elif len(members) > 1 or key in self._once:
                self._once.pop(key, None)
                new.append(key)
            else:
                self._once[key] = None
                if len(self._once) > _REMEMBERED:
                    self._once.popitem(last=False)
        if new:
            # none is dropped that this call needs
            room = self._most - sum(key in self._places for key in owners)
            self._make(new[:room], owners, rows, draw)
        for key, members in owners.items():
            found[members] = self._places.get(key, -1)
        return None if (found < 0).all() else Under(self.frames, self.stamps, found)

    def _make(
        self,
        new: list[bytes],
        owners: dict[bytes, NDArray[np.int64]],
        rows: RenderRows,
        draw: Callable[[RenderRows, CameraFrames], None],
    ) -> None:
        picked = np.array([owners[key][0] for key in new], np.int64)
        if not len(picked):
            return
        fresh = CameraFrames.empty(self._spec, len(new))
        draw(pick_rows(rows, picked), fresh)
        places: list[int] = []
        for key in new:
            full = len(self._places) >= self._most
            place = self._places.popitem(last=False)[1] if full else len(self._places)
            self._places[key] = place
            places.append(place)
        self._grow(max(places) + 1)
        for kind in self._spec.data_types:
            getattr(self.frames, kind)[places] = getattr(fresh, kind)
        self.stamps[places] = self._drawn + np.arange(len(places))
        self._drawn += len(places)

    def _grow(self, size: int) -> None:
        count = len(self.stamps)
        if size > count:
            size = min(self._most, max(size, 2 * count))
            old, self.frames = self.frames, CameraFrames.empty(self._spec, size)
            for kind in self._spec.data_types:
                getattr(self.frames, kind)[:count] = getattr(old, kind)
            self.stamps = np.concatenate([self.stamps, np.full(size - count, -1)])


def pick_rows(rows: RenderRows, index: slice | NDArray[np.int64]) -> RenderRows:
    """Return some rows; what serves all serves them, too."""
    parts: list[Any] = [part[index] if len(part) > 1 else part for part in rows]
    return RenderRows(*parts)
