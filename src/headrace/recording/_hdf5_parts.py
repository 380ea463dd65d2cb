"""What the HDF5 formats share: units as files of their own, and joining them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import require_extra
from headrace.recording._fields import Array

if TYPE_CHECKING:
    import h5py


def open_hdf5(path: Path, mode: str) -> h5py.File:
    """Open an HDF5 file; names keep the order in which they were made."""
    library = require_extra("h5py", extra="record", purpose="HDF5")
    # libver="latest" would make smaller files, but old readers refuse them
    return library.File(path, mode, track_order=True)


def put(group: h5py.Group, name: str, values: Array) -> None:
    """Write an array, making the groups on the way to it."""
    *groups, leaf = name.split("/")
    for step in groups:
        group = group.require_group(step)
    group.create_dataset(leaf, data=values)


def put_attributes(group: h5py.Group | h5py.File, attributes: Iterable[tuple[str, Any]]) -> None:
    """Write attributes; those that are None are left out."""
    for name, value in attributes:
        if value is not None:
            group.attrs[name] = value


def join(units: Sequence[Path], out: h5py.File, group: str) -> None:
    """Copy what is under ``group`` in each unit's ``part.hdf5`` to the same group of ``out``, in order."""
    target = out.require_group(group)
    for unit in units:
        with open_hdf5(unit / "part.hdf5", "r") as part:
            source: Any = part[group]
            for name in source:
                part.copy(source[name], target, name)


def row_counts(group: h5py.Group) -> Iterator[tuple[str, int]]:
    """Every array under a group, by path, with its number of rows."""
    for name in map(str, group):
        item: Any = group[name]
        if hasattr(item, "shape"):
            yield name, int(item.shape[0])
        else:
            yield from ((f"{name}/{path}", rows) for path, rows in row_counts(item))
