"""The rows of running episodes: the pages that they go to. Pages leave with their episode, and come back from disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError
from headrace.recording._episode_file import EpisodeMeta
from headrace.recording._fields import Array, Field
from headrace.recording._sources import Sources
from headrace.recording._store import Group

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]

_PAGE_BYTES = 1 << 18
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

    def give_back(self, pages: list[Bytes]) -> None:
        """Take pages back that nobody reads any more."""
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
        self.columns: dict[str, slice] = {}
        """Which bytes of a row are whose."""
        width = 0
        for field in fields:
            self.columns[field.name] = slice(width, width + field.row_bytes)
            width += field.row_bytes
        self.page_rows = max(1, min(_PAGE_ROWS, _PAGE_BYTES // width))
        self._block: Bytes = np.empty((num_envs, self.page_rows, width), np.uint8)
        # an element is a row: copying it is one call, whatever its fields are
        self._rows: Array = self._block.view(f"V{width}")[:, :, 0]
        self._packed: Bytes = np.empty((num_envs, width), np.uint8)
        self._full: list[list[Bytes]] = [[] for _ in range(num_envs)]

    def write(self, slots: Index, at: Index, parts: Sequence[Bytes]) -> None:
        """Copy a row of every field, uint8 (n, …) in order, to rows ``at`` of environments ``slots``, both (n,)."""
        packed = np.concatenate(parts, axis=1, out=self._packed[: len(slots)])
        places = at % self.page_rows
        self._rows[slots, places] = packed.view(self._rows.dtype)[:, 0]
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

    def give_back(self, pages: list[Bytes]) -> None:
        """Nothing is kept: these pages are small and few."""

    def bodies(self, pages: list[Bytes]) -> dict[str, list[Array]]:
        """The columns of each field, cut out of the packed rows."""
        rows = np.concatenate(pages) if len(pages) > 1 else pages[0]
        return {name: [rows[:, columns].copy()] for name, columns in self.columns.items()}

    def held_bytes(self) -> int:
        """Memory of all running episodes."""
        return self._block.nbytes + sum(map(len, self._full)) * self._block[0].nbytes


class PagedLane:
    """One large field, whose rows go straight to pages of their own environment. Pages that come back are used again:
    the system clears fresh memory first, which takes as long as the copy."""

    def __init__(self, field: Field, num_envs: int) -> None:
        self.fields = (field,)
        self.width = field.row_bytes
        self.page_rows = max(1, min(_PAGE_ROWS, _PAGE_BYTES // self.width))
        self._pages: list[list[Bytes]] = [[] for _ in range(num_envs)]
        self._spare: deque[Bytes] = deque()

    def write(self, slots: Index, at: Index, rows: Bytes) -> None:
        """Copy ``rows[k]`` (uint8, width) to row ``at[k]`` of environment ``slots[k]``."""
        page_rows, pages = self.page_rows, self._pages
        for slot, place, row in zip(slots.tolist(), at.tolist(), rows, strict=True):
            number, offset = divmod(place, page_rows)
            held = pages[slot]
            if number == len(held):
                held.append(self._page())
            held[number][offset] = row

    def _page(self) -> Bytes:
        try:
            return self._spare.pop()
        except IndexError:
            return np.empty((self.page_rows, self.width), np.uint8)

    def take(self, slot: int, count: int) -> list[Bytes]:
        """Hand over an environment's pages and forget them."""
        pages, self._pages[slot] = self._pages[slot], []
        left = count % self.page_rows
        return [*pages[:-1], pages[-1][:left]] if left else pages

    def drop(self, slot: int) -> None:
        """Forget an environment's rows."""
        pages, self._pages[slot] = self._pages[slot], []
        self._spare.extend(pages)

    def give_back(self, pages: list[Bytes]) -> None:
        """Use pages that were taken again; any thread may call it."""
        self._spare.extend(_whole(page) for page in pages)

    def bodies(self, pages: list[Bytes]) -> dict[str, list[Array]]:
        """The pages themselves."""
        return {self.fields[0].name: [*pages]}

    def held_bytes(self) -> int:
        """Memory of all running episodes, and of pages that wait for the next ones."""
        return (sum(map(len, self._pages)) + len(self._spare)) * self.page_rows * self.width


def _whole(page: Bytes) -> Bytes:
    """The page that a page used in part is the beginning of."""
    return page if page.base is None else cast("Bytes", page.base)


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
        return sum(_whole(page).nbytes for _, pages in self.lanes for page in pages)

    def release(self) -> None:
        """Give the memory back once the disk has the episode. Safe to call again: nothing is given back twice."""
        for lane, pages in self.lanes:
            lane.give_back(pages)
            pages.clear()


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
        self._everyone = np.arange(num_envs)

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
            parts = [self._chosen(sources[field.name], slots, rows) for field in self._packed.fields]
            self._packed.write(slots, at, parts)
        for lane in self._paged:
            lane.write(slots, at, self._chosen(sources[lane.fields[0].name], slots, rows))

    def _chosen(self, source: tuple[Array, bool], slots: Index, rows: Index) -> Bytes:
        """The rows to copy, as bytes (n, row_bytes); a view where they are all of them."""
        values, per_env = source
        flat = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
        index = slots if per_env else rows
        if len(index) == len(flat) and np.array_equal(index, self._everyone[: len(index)]):
            return flat
        return flat[index]

    def _check(self, field: Field, values: Array) -> None:
        if values.dtype != field.dtype or tuple(values.shape[1:]) != field.shape:
            raise DataError(
                f"{field.name}: expected rows of {field.dtype}{field.shape} as in the first step, got "
                f"{values.dtype}{tuple(values.shape[1:])}; an episode's dtype and shape must not change"
            )
