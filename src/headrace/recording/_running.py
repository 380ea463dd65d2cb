"""The rows of running episodes: the pages that they go to. Pages grow with an episode and leave with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError
from headrace.recording._episode_file import EpisodeMeta
from headrace.recording._fields import Array, Field
from headrace.recording._sources import Sources
from headrace.recording._store import Group

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]

_PAGE_BYTES = 1 << 16
_PAGE_ROWS = 64
_SMALL = 4096
"""Rows up to this size are packed side by side: one copy a step for all of them instead of one a field."""


class Lane(Protocol):
    """Rows of some fields of every environment's running episode; owns them until they are taken."""

    fields: tuple[Field, ...]

    def take(self, slot: int, count: int) -> list[Bytes]:
        """Hand over the pages of an environment whose episode has ``count`` rows, and forget them."""
        ...

    def drop(self, slot: int) -> None:
        """Forget an environment's rows."""
        ...

    def bodies(self, pages: list[Bytes]) -> dict[str, list[Array]]:
        """The rows of each field, in contiguous pieces."""
        ...

    def held_bytes(self) -> int:
        """Memory of all running episodes."""
        ...


class PackedLane:
    """Small fields, side by side in a row. The newest page of every environment is part of one block of memory, so that
    a step is one assignment; a page that is full is copied out of it."""

    def __init__(self, fields: Sequence[Field], num_envs: int) -> None:
        self.fields = tuple(fields)
        self.dtype = np.dtype([(field.name, field.dtype, field.shape) for field in fields])
        width = self.dtype.itemsize
        self.columns: dict[str, slice] = {}
        """Which bytes of a row are whose."""
        start = 0
        for field in fields:
            self.columns[field.name] = slice(start, start + field.row_bytes)
            start += field.row_bytes
        self.page_rows = max(1, min(_PAGE_ROWS, _PAGE_BYTES // width))
        self._block: Bytes = np.empty((num_envs, self.page_rows, width), np.uint8)
        # an element is a row: copying it is one call, whatever its fields are
        self._rows: Array = self._block.view(f"V{width}")[:, :, 0]
        self._full: list[list[Bytes]] = [[] for _ in range(num_envs)]

    def write(self, slots: Index, at: Index, rows: Array) -> None:
        """Copy ``rows`` (n,), of the lane's dtype, to rows ``at`` of environments ``slots``, both (n,)."""
        places = at % self.page_rows
        self._rows[slots, places] = rows.view(self._rows.dtype)
        for slot in slots[places == self.page_rows - 1].tolist():
            self._full[slot].append(self._block[slot].copy())

    def take(self, slot: int, count: int) -> list[Bytes]:
        """Hand over an environment's pages and forget them."""
        pages, self._full[slot] = self._full[slot], []
        left = count % self.page_rows
        return [*pages, self._block[slot, :left].copy()] if left else pages

    def drop(self, slot: int) -> None:
        """Forget an environment's rows."""
        self._full[slot] = []

    def bodies(self, pages: list[Bytes]) -> dict[str, list[Array]]:
        """The columns of each field, cut out of the packed rows."""
        rows = np.concatenate(pages) if len(pages) > 1 else pages[0]
        return {name: [rows[:, columns].copy()] for name, columns in self.columns.items()}

    def held_bytes(self) -> int:
        """Memory of all running episodes."""
        return self._block.nbytes + sum(map(len, self._full)) * self._block[0].nbytes


class PagedLane:
    """One large field, whose rows go straight to pages of their own environment."""

    def __init__(self, field: Field, num_envs: int) -> None:
        self.fields = (field,)
        self.width = field.row_bytes
        self.page_rows = max(1, min(_PAGE_ROWS, _PAGE_BYTES // self.width))
        self._pages: list[list[Bytes]] = [[] for _ in range(num_envs)]

    def write(self, slots: Index, at: Index, rows: Bytes, index: Index) -> None:
        """Copy ``rows[index[k]]`` (uint8, width) to row ``at[k]`` of environment ``slots[k]``."""
        page_rows, width, pages = self.page_rows, self.width, self._pages
        for slot, place, row in zip(slots.tolist(), at.tolist(), index.tolist(), strict=True):
            number, offset = divmod(place, page_rows)
            held = pages[slot]
            if number == len(held):
                held.append(np.empty((page_rows, width), np.uint8))
            held[number][offset] = rows[row]

    def take(self, slot: int, count: int) -> list[Bytes]:
        """Hand over an environment's pages and forget them."""
        pages, self._pages[slot] = self._pages[slot], []
        left = count % self.page_rows
        return [*pages[:-1], pages[-1][:left]] if left else pages

    def drop(self, slot: int) -> None:
        """Forget an environment's rows."""
        self._pages[slot] = []

    def bodies(self, pages: list[Bytes]) -> dict[str, list[Array]]:
        """The pages themselves."""
        return {self.fields[0].name: [*pages]}

    def held_bytes(self) -> int:
        """Memory of all running episodes."""
        return sum(map(len, self._pages)) * self.page_rows * self.width


def _name(field: Field) -> str:
    return field.name


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEpisode:
    """An episode on its way to the disk. Owns its rows."""

    meta: EpisodeMeta
    group: Group
    lanes: tuple[tuple[Lane, list[Bytes]], ...]
    """Each lane with this episode's pages of it."""
    empty: tuple[Field, ...]
    """Fields whose rows have no bytes."""

    def columns(self) -> Iterator[tuple[Field, list[Array]]]:
        """Fields in order of name, each with its rows in contiguous pieces."""
        bodies: dict[str, list[Array]] = {field.name: [] for field in self.empty}
        for lane, pages in self.lanes:
            bodies.update(lane.bodies(pages))
        fields = [*self.empty, *(field for lane, _ in self.lanes for field in lane.fields)]
        for field in sorted(fields, key=_name):
            yield field, bodies[field.name]

    @property
    def held_bytes(self) -> int:
        """Memory of the pages, of which the last may be used in part."""
        return sum((page if page.base is None else page.base).nbytes for _, pages in self.lanes for page in pages)


class RunningRows:
    """Some fields of every environment's running episode, all with one row per step, or all with one more."""

    def __init__(self, sources: Sources, num_envs: int, *, with_first: bool) -> None:
        self.fields = tuple(
            [
                Field(name=name, dtype=values.dtype, shape=tuple(values.shape[1:]), with_first=with_first)
                for name, (values, _) in sources.items()
            ]
        )
        small = [field for field in self.fields if 0 < field.row_bytes <= _SMALL]
        self._packed = PackedLane(small, num_envs) if small else None
        self._paged = [PagedLane(field, num_envs) for field in self.fields if field.row_bytes > _SMALL]
        self._with_first = with_first

    @property
    def empty(self) -> tuple[Field, ...]:
        """The fields whose rows have no bytes, and which need no memory."""
        return tuple([field for field in self.fields if not field.row_bytes])

    @property
    def lanes(self) -> list[Lane]:
        """Where the rows are."""
        return [*([self._packed] if self._packed else []), *self._paged]

    def take(self, slot: int, length: int) -> list[tuple[Lane, list[Bytes]]]:
        """Hand over the rows of an environment whose episode has ``length`` steps, and forget them."""
        return [(lane, lane.take(slot, length + self._with_first)) for lane in self.lanes]

    def write(self, sources: Sources, slots: Index, rows: Index, at: Index) -> None:
        """Copy rows of environments ``slots``, which are ``rows`` of the record, to rows ``at`` of their episodes."""
        for field in self.fields:
            self._check(field, sources[field.name][0])
        if self._packed is not None:
            packed = np.empty(len(slots), self._packed.dtype)
            for field in self._packed.fields:
                values, per_env = sources[field.name]
                packed[field.name] = values[slots if per_env else rows]
            self._packed.write(slots, at, packed)
        for lane in self._paged:
            values, per_env = sources[lane.fields[0].name]
            flat = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
            lane.write(slots, at, flat, slots if per_env else rows)

    def _check(self, field: Field, values: Array) -> None:
        if values.dtype != field.dtype or tuple(values.shape[1:]) != field.shape:
            raise DataError(
                f"{field.name}: expected rows of {field.dtype}{field.shape} as in the first step, got "
                f"{values.dtype}{tuple(values.shape[1:])}; an episode's dtype and shape must not change"
            )
