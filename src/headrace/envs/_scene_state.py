"""What the pictures of a simulation depend on, as rows of numbers that can be kept and drawn later."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import ConfigError
from headrace.sim import PoseReader, ScenePoses, Simulation
from headrace.sim._camera import PICTURE_FIELDS

_STATE = ("qpos", "mocap_pos", "mocap_quat")
_SEEN = ("geom_", "site_", "cam_", "light_", "mat_", "tex_", "mesh_", "hfield_", "skin_", "vis.", "stat.")
"""Model fields that begin so may change a picture."""
_UNSEEN = (
    *("geom_friction", "geom_margin", "geom_gap", "geom_solref", "geom_solimp", "geom_solmix", "geom_contype"),
    *("geom_conaffinity", "geom_condim", "geom_priority", "geom_fluid", "geom_user", "geom_rbound", "geom_aabb"),
    *("site_user", "cam_user"),
)
"""Those of them that do not."""


class SceneState:
    """Reads rows from a simulation: qpos, mocap poses, and the model fields that have a value per environment.

    A model field that changes what is seen and that cameras cannot draw per environment is an error, never a picture of
    the nominal model.
    """

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        model: Any = sim.model
        self._sizes = {"qpos": model.nq, "mocap_pos": 3 * model.nmocap, "mocap_quat": 4 * model.nmocap}
        self._fields: tuple[str, ...] = ()
        self.refresh()

    def refresh(self) -> bool:
        """Notice model fields that got a value per environment; whether there are new ones."""
        for name in self._sim.expanded:
            if name.startswith(_SEEN) and not name.startswith(_UNSEEN) and name not in PICTURE_FIELDS:
                raise ConfigError(
                    f"camera: {name!r} differs between environments, and pictures cannot show that; randomize one of "
                    f"{', '.join(PICTURE_FIELDS)}, or the looks of the camera"
                )
        found = tuple(name for name in PICTURE_FIELDS if name in self._sim.expanded)
        new = found != self._fields
        self._fields = found
        return new

    @property
    def columns(self) -> dict[str, slice]:
        """Name of a quantity → its columns in a row."""
        sizes = self._sizes | {name: self._sim.expanded[name][0].numel() for name in self._fields}
        found: dict[str, slice] = {}
        at = 0
        for name, size in sizes.items():
            found[name] = slice(at, at + size)
            at += size
        return found

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return max(columns.stop for columns in self.columns.values())

    @property
    def has_fields(self) -> bool:
        """Whether rows hold more than positions."""
        return bool(self._fields)

    def take(self, ids: Tensor | None) -> Tensor:
        """Rows of the environments ``ids`` (n,), or of all: float64 (n, width), fresh, where the simulation is."""
        parts = [self._sim.field(name) for name in _STATE if self._sizes[name]]
        parts += [self._sim.expanded[name] for name in self._fields]
        picked = [part if ids is None else part.index_select(0, ids) for part in parts]
        rows = len(picked[0]) if picked else self._sim.num_envs if ids is None else len(ids)
        if self._sim.device.type != "cpu":
            none = torch.empty((rows, 0), dtype=torch.float64, device=self._sim.device)
            return torch.cat([none, *(part.flatten(1).to(torch.float64) for part in picked)], dim=1)
        return torch.from_numpy(
            np.concatenate(
                [np.zeros((rows, 0)), *(part.flatten(1).numpy() for part in picked)], axis=1, dtype=np.float64
            )
        )

    def widen(self, rows: NDArray[np.float64], before: dict[str, slice]) -> NDArray[np.float64]:
        """Rows (…, width) that were taken when the columns were ``before``: what was not there yet was nominal."""
        wide = np.empty((*rows.shape[:-1], self.width))
        for name, columns in self.columns.items():
            known = name in before
            wide[..., columns] = rows[..., before[name]] if known else np.ravel(getattr(self._sim.model, name))
        return wide

    def positions(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Joint positions (n, nq), mocap positions (n, m, 3) and quaternions (n, m, 4) of rows (n, width): views."""
        columns, bodies = self.columns, self._sizes["mocap_pos"] // 3
        places, turns = rows[:, columns["mocap_pos"]], rows[:, columns["mocap_quat"]]
        return rows[:, columns["qpos"]], places.unflatten(1, (bodies, 3)), turns.unflatten(1, (bodies, 4))

    def poses(self, reader: PoseReader, rows: NDArray[np.float64]) -> ScenePoses:
        """The poses of rows (n, width)."""
        n, columns = len(rows), self.columns
        fields = {
            name: rows[:, columns[name]].reshape(n, *np.shape(getattr(self._sim.model, name))) for name in self._fields
        }
        mocap = (rows[:, columns["mocap_pos"]].reshape(n, -1, 3), rows[:, columns["mocap_quat"]].reshape(n, -1, 4))
        return reader.read(rows[:, columns["qpos"]], *mocap, fields=fields)
