"""robomimic's HDF5 layout with Isaac Lab's additions.

```
/                 format_version = 1
/data             total, env_args (JSON: env_name, type, env_kwargs)
/data/demo_N      num_samples, seed, success, episode_id; actions, rewards, dones, states, obs/…, next_obs/…,
                  processed_actions, initial_state/physics (1, D)
/mask             all, succeeded, failed: names of demonstrations
```

Quaternions are where an observation or a flat state has them, in the simulator's order: ``format_version`` speaks of
Isaac Lab's pose arrays, and there are none in here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.errors import ConfigError
from headrace.recording._dataset import EpisodeDataset
from headrace.recording._export import Start, Unit
from headrace.recording._fields import Field
from headrace.recording._hdf5_parts import join, open_hdf5, put, put_attributes

FORMAT_VERSION = 1
GYM_TYPE = 2
"""robomimic's number for a Gymnasium environment."""


class RobomimicExporter:
    """Writes one ``.hdf5`` file."""

    unit_bytes = 256 << 20
    space = 4  # observations are stored twice, as obs and next_obs, and all of it in units and in the result

    start = Start()

    def __init__(self, dataset: EpisodeDataset) -> None:
        self._dataset = dataset

    def check(self, fields: Sequence[Field], target: Path) -> None:
        """Demonstrations need actions."""
        if "actions" not in {field.name for field in fields}:
            raise ConfigError("robomimic: demonstrations need 'actions'; record them")
        if target.suffix not in (".hdf5", ".h5"):
            raise ConfigError(f"robomimic: expected a target that ends in .hdf5, got {target}")

    def write_unit(self, unit: Unit, folder: Path) -> None:
        """Demonstrations under their final names, in a file of their own."""
        with open_hdf5(folder / "part.hdf5", "w") as file:
            data = file.create_group("data", track_order=True)
            for number, episode in enumerate(unit.episodes, start=unit.first_episode):
                meta = episode.meta
                demo = data.create_group(f"demo_{number}")
                put_attributes(
                    demo,
                    [
                        ("num_samples", meta.length),
                        ("seed", meta.seed),
                        ("success", meta.success),
                        ("episode_id", meta.episode_id),
                        ("instruction", meta.instruction or None),
                    ],
                )
                for name in episode.names:
                    values = episode.read(name)
                    if name.startswith("obs/"):
                        put(demo, name, values[:-1])
                        put(demo, f"next_{name}", values[1:])
                    elif name == "states":
                        put(demo, "states", values[:-1])
                        put(demo, "initial_state/physics", values[:1])
                    else:
                        put(demo, name, values)
                if "terminated" in episode.names:
                    dones = episode.read("terminated") | episode.read("truncated")
                    put(demo, "dones", dones.astype(np.int64))

    def assemble(self, units: Sequence[Path], out: Path) -> None:
        """Join the units in natural order and add attributes and masks."""
        info, entries = self._dataset.info, self._dataset.entries
        with open_hdf5(out, "w") as file:
            file.attrs["format_version"] = FORMAT_VERSION
            data = file.create_group("data", track_order=True)
            data.attrs["total"] = sum(entry.length for entry in entries)
            arguments = {"env_name": info.env_name, "type": GYM_TYPE, "env_kwargs": dict(info.env_args)}
            data.attrs["env_args"] = json.dumps(arguments)
            join(units, file, "data")
            names = [f"demo_{number}" for number in range(len(entries))]
            masks = {
                "all": names,
                "succeeded": [name for name, entry in zip(names, entries, strict=True) if entry.success],
                "failed": [name for name, entry in zip(names, entries, strict=True) if entry.success is False],
            }
            for mask, chosen in masks.items():
                if chosen:
                    put(file.require_group("mask"), mask, np.array(chosen, dtype="S"))
