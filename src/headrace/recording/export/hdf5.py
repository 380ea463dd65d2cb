"""The HDF5 formats: robomimic's with Isaac Lab's additions, and Minari's.

robomimic, one file:

```
/                 format_version = 1
/data             total, env_args (JSON: env_name, type, env_kwargs)
/data/demo_N      num_samples, seed, success, episode_id, instruction; actions, rewards, dones, states, obs/…,
                  next_obs/…, processed_actions, initial_state/physics (1, D)
/mask             all, succeeded, failed: names of demonstrations
```

Quaternions are where an observation or a flat state has them, in the simulator's order: ``format_version`` speaks of
Isaac Lab's pose arrays, and there are none in here.

Minari, one directory: ``data/metadata.json`` and ``data/main_data.hdf5``, with images as they are (no JPEG). The
directory's name is the dataset id, so that ``minari.load_dataset("ant-v0")`` finds ``<root>/ant-v0`` where
``MINARI_DATASETS_PATH`` is ``<root>``.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from headrace._gymnasium_ids import GYMNASIUM
from headrace.errors import ConfigError, DataError, require_extra
from headrace.files import open_untrusted, parsing
from headrace.recording._episode_file import EpisodeMeta
from headrace.recording._store import INFO, DatasetInfo, whole_space
from headrace.recording.dataset import Episode, EpisodeDataset
from headrace.recording.export.exporting import Exporter
from headrace.recording.fields import Field

if TYPE_CHECKING:
    import h5py


def open_hdf5(path: Path, mode: str) -> h5py.File:
    """Open an HDF5 file; names keep the order in which they were made."""
    if mode == "r":
        open_untrusted(path).close()
    library = require_extra("h5py", extra="record", purpose="HDF5")
    # libver="latest" would make smaller files, but old readers refuse them
    return library.File(path, mode, track_order=True)


def put_meta(group: h5py.Group, meta: EpisodeMeta, **more: int) -> None:
    """Write what an episode is as attributes; those that are not known are left out."""
    known = {"seed": meta.seed, "success": meta.success, "episode_id": meta.episode_id}
    for name, value in {**more, **known, "instruction": meta.instruction or None}.items():
        if value is not None:
            # a seed may be larger than any integer of HDF5
            large = isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
            group.attrs[name] = str(value) if large else value


def plain_arrays(group: h5py.Group, where: str) -> Iterator[tuple[str, h5py.Dataset]]:
    """Yield the arrays below a group by path; links to other places and files are refused."""
    for name in map(str, group):
        link: Any = group.get(name, getlink=True)
        item: Any = group[name] if type(link).__name__ == "HardLink" else None
        if item is None or (hasattr(item, "shape") and (item.external or item.is_virtual)):
            raise DataError(f"{where}/{name}: expected an array or a group in the file itself, got a link")
        if hasattr(item, "shape") and math.prod(item.shape[1:]) * item.dtype.itemsize > _LARGEST_ROW:
            raise DataError(f"{where}/{name}: expected rows of at most {_LARGEST_ROW:,} bytes, got {item.shape}")
        if hasattr(item, "shape"):
            yield name, item
        else:
            yield from ((f"{name}/{path}", array) for path, array in plain_arrays(item, f"{where}/{name}"))


_LARGEST_ROW = 1 << 28
FORMAT_VERSION = 1
GYM_TYPE = 2
"""robomimic's number for a Gymnasium environment."""


class RobomimicExporter(Exporter):
    """Writes one ``.hdf5`` file."""

    space = 2  # observations are stored twice, as obs and next_obs
    is_file = True

    def check(self, fields: Sequence[Field], target: Path) -> None:
        """Demonstrations need actions."""
        if "actions" not in {field.name for field in fields}:
            raise ConfigError("robomimic: demonstrations need 'actions'; record them")
        if target.suffix not in (".hdf5", ".h5"):
            raise ConfigError(f"robomimic: expected a target that ends in .hdf5, got {target}")

    def write(self, out: Path, episodes: Iterable[Episode]) -> None:
        """Write demonstrations in natural order, attributes and masks."""
        info, entries = self._dataset.info, self._dataset.entries
        with open_hdf5(out, "w") as file:
            file.attrs["format_version"] = FORMAT_VERSION
            data = file.create_group("data", track_order=True)
            data.attrs["total"] = sum(entry.length for entry in entries)
            arguments = {"env_name": info.source, "type": GYM_TYPE, "env_kwargs": info.arguments}
            data.attrs["env_args"] = json.dumps(arguments)
            for number, episode in enumerate(episodes):
                _write_demonstration(data.create_group(f"demo_{number}"), episode)
            names = [f"demo_{number}" for number in range(len(entries))]
            masks = {
                "all": names,
                "succeeded": [name for name, entry in zip(names, entries, strict=True) if entry.success],
                "failed": [name for name, entry in zip(names, entries, strict=True) if entry.success is False],
            }
            for mask, chosen in masks.items():
                if chosen:
                    file.create_dataset(f"mask/{mask}", data=np.array(chosen, dtype="S"))


def _write_demonstration(group: h5py.Group, episode: Episode) -> None:
    put_meta(group, episode.meta, num_samples=episode.meta.length)
    for name in episode.names:
        values = episode.read(name)
        if name.startswith("obs/"):
            group.create_dataset(name, data=values[:-1])
            group.create_dataset(f"next_{name}", data=values[1:])
        elif name == "states":
            group.create_dataset("states", data=values[:-1])
            group.create_dataset("initial_state/physics", data=values[:1])
        else:
            group.create_dataset(name, data=values)
    if "terminated" in episode.names:
        dones = episode.read("terminated") | episode.read("truncated")
        group.create_dataset("dones", data=dones.astype(np.int64))


MINARI_VERSION = "0.5.4"
"""The first that reads images which are not JPEG; older ones refuse the dataset instead of misreading it."""

_MINARI_NAMES = {"rewards": "rewards", "terminated": "terminations", "truncated": "truncations", "actions": "actions"}
_ID = re.compile(r"[-_\w]+-v\d+")


class MinariExporter(Exporter):
    """Writes one dataset directory."""

    space = 1

    def __init__(self, dataset: EpisodeDataset) -> None:
        super().__init__(dataset)
        self._fields: list[Field] = []
        self._name = ""
        self._about: dict[str, str] = {}

    def check(self, fields: Sequence[Field], target: Path) -> None:
        """Minari has no optional arrays, and its dataset ids have a form."""
        names = {field.name for field in fields}
        missing = sorted(set(_MINARI_NAMES) - names)
        if missing or not any(name.startswith("obs/") for name in names):
            wanted = ", ".join(missing or ["obs"])
            raise ConfigError(f"Minari: needs {wanted}; record obs, actions, rewards and flags")
        if not _ID.fullmatch(target.name):
            raise ConfigError(f"Minari: expected a directory named like 'ant-v0' (the dataset id), got {target.name!r}")
        self._fields, self._name = list(fields), target.name
        info = self._dataset.info
        with parsing(self._dataset.path / INFO):
            self._about = {
                "observation_space": json.dumps(self._space("obs", info.spaces.get("observation"))),
                "action_space": json.dumps(self._space("actions", info.spaces.get("action"))),
            }
            spec = _env_spec(info)
        if spec is not None:
            self._about["env_spec"] = spec

    def write(self, out: Path, episodes: Iterable[Episode]) -> None:
        """Write the episodes, and describe the spaces."""
        data = out / "data"
        data.mkdir()
        with open_hdf5(data / "main_data.hdf5", "w") as file:
            for number, episode in enumerate(episodes):
                group = file.create_group(f"episode_{number}")
                put_meta(group, episode.meta, id=number, total_steps=episode.meta.length)
                for name in episode.names:
                    path = _MINARI_NAMES.get(name, f"infos/{name}")
                    if name.startswith("obs/"):
                        path = name.replace("obs/", "observations/", 1)
                    group.create_dataset(path, data=episode.read(name))
        info = self._dataset.info
        metadata = {
            "total_episodes": len(self._dataset),
            "total_steps": self._dataset.steps,
            "data_format": "hdf5",
            "jpeg_encoding": False,
            "dataset_id": self._name,
            "minari_version": MINARI_VERSION,
            "description": info.instruction or info.source,
            "dataset_size": round((data / "main_data.hdf5").stat().st_size / 1e6, 1),
            **self._about,
        }
        (data / "metadata.json").write_text(json.dumps(metadata))

    def _space(self, path: str, known: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the space of the arrays at a path: the declared one where dtype and shape are its own."""
        exact = [field for field in self._fields if field.name == path]
        if exact:
            fits = known is not None and _fits(known, exact[0])
            return whole_space(known) if known is not None and fits else _box(exact[0])
        below = [field.name.removeprefix(f"{path}/") for field in self._fields if field.name.startswith(f"{path}/")]
        parts = known["subspaces"] if known is not None and known["type"] == "Dict" else {}
        names = dict.fromkeys(name.split("/")[0] for name in below)
        return {"type": "Dict", "subspaces": {name: self._space(f"{path}/{name}", parts.get(name)) for name in names}}


def _fits(space: Mapping[str, Any], field: Field) -> bool:
    if space["type"] == "Discrete":
        return field.shape == () and np.issubdtype(field.dtype, np.integer)
    if space["type"] == "MultiDiscrete":
        return field.shape == np.shape(space["nvec"]) and np.issubdtype(field.dtype, np.integer)
    if space["type"] == "MultiBinary":
        n = space["n"]
        return field.shape == (tuple(n) if isinstance(n, list) else (n,))
    return space["type"] == "Box" and tuple(space["shape"]) == field.shape and space["dtype"] == str(field.dtype)


def _env_spec(info: DatasetInfo) -> str | None:
    """Return the Gymnasium spec of the environment, from which Minari recovers it.

    None where it has no Gymnasium id.
    """
    if info.source.startswith(GYMNASIUM):
        found = gymnasium.registry.get(info.source.removeprefix(GYMNASIUM))
        arguments: dict[str, Any] = dict(info.arguments.get("overrides", {}))
    else:
        ours = [spec for spec in gymnasium.registry.values() if spec.namespace == "headrace"]
        found = next((spec for spec in ours if spec.kwargs.get("task") == info.source), None)
        arguments = {**info.arguments, "dict_obs": True}  # as it is recorded
    if found is None:
        return None
    spec = copy.deepcopy(found)
    spec.kwargs |= arguments
    return spec.to_json()


def _box(field: Field) -> dict[str, Any]:
    """Return a field as Minari writes a ``gymnasium.spaces.Box``: bounds are what the dtype can hold."""
    low: Any
    high: Any
    if field.dtype == np.bool_:
        low, high = False, True
    elif np.issubdtype(field.dtype, np.integer):
        limits = np.iinfo(field.dtype)
        low, high = limits.min, limits.max
    else:
        low, high = -np.inf, np.inf
    described = {"type": "Box", "dtype": str(field.dtype), "shape": list(field.shape), "low": low, "high": high}
    return whole_space(described)
