"""The rows of running episodes: the pages that they go to. Pages leave with their episode, and come back from disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.pages import find_starts, put_rows
from headrace.errors import DataError
from headrace.recording._episode_file import EpisodeMeta
from headrace.recording._fields import Array, Field
from headrace.recording._sources import Sources
from headrace.recording._store import Group

Index = NDArray[np.int64]

_PAGE_BYTES = 1 << 18
_PAGE_ROWS = 128
_SHARE = 1 << 18
"""Bytes of a step that are worth a second thread: the processor waits for memory, and physics rests meanwhile."""
_SMALL = 4096
"""Rows up to this size are packed side by side: pages of one byte per row would be many and small."""


class Lane:
    """Some fields side by side in a row, in pages of every environment's running episode. Pages that come back are used
    again: the system clears fresh memory first, which takes as long as the copy.

    Args:
        fields: of one row.
        heads: (num_envs,) kept up to date: the address of each environment's newest page, 0 without one.
    """

    def __init__(self, fields: Sequence[Field], heads: Index) -> None:
        self.fields = tuple(fields)
        ends = np.cumsum([0, *(field.row_bytes for field in fields)]).tolist()
        self.width: int = ends[-1]
        # a field of a row is one element: copying it is one call, whatever it is
        self._dtype = np.dtype(
            {
                "names": [field.name for field in fields],
                "formats": [f"V{field.row_bytes}" for field in fields],
                "offsets": ends[:-1],
                "itemsize": self.width,
            }
        )
        self.offsets: list[int] = ends[:-1]
        """Of each field in a row."""
        self.page_rows = max(1, min(_PAGE_ROWS, _PAGE_BYTES // self.width))
        self._heads = heads
        self._pages: list[list[Array]] = [[] for _ in heads]
        self._spare: deque[Array] = deque()

    def begin_page(self, slot: int) -> None:
        """Give an environment a page for its next rows."""
        try:
            page = self._spare.pop()
        except IndexError:
            page = np.empty(self.page_rows, self._dtype)
        self._pages[slot].append(page)
        self._heads[slot] = _address(page)

    def take(self, slot: int, count: int) -> list[Array]:
        """Hand over the pages of an environment whose episode has ``count`` rows, and forget them."""
        pages, self._pages[slot] = self._pages[slot], []
        self._heads[slot] = 0
        left = count % self.page_rows
        return [*pages[:-1], pages[-1][:left]] if left else pages

    def drop(self, slot: int) -> None:
        """Forget an environment's rows."""
        pages, self._pages[slot] = self._pages[slot], []
        self._heads[slot] = 0
        self._spare.extend(pages)

    def give_back(self, pages: list[Array]) -> None:
        """Use pages that were taken again; any thread may call it."""
        self._spare.extend(_whole(page) for page in pages)

    def held_bytes(self) -> int:
        """Memory of all running episodes, and of pages that wait for the next ones."""
        return (sum(map(len, self._pages)) + len(self._spare)) * self.page_rows * self.width


def _address(values: Array) -> int:
    return values.__array_interface__["data"][0]


def _whole(page: Array) -> Array:
    """The page that a page used in part is the beginning of."""
    return page if page.base is None else page.base


def _name(column: tuple[Field, list[Array]]) -> str:
    return column[0].name


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEpisode:
    """An episode on its way to the disk. Owns its rows."""

    meta: EpisodeMeta
    group: Group
    lanes: tuple[tuple[Lane, list[Array]], ...]
    """Each lane with this episode's pages of it."""
    empty: tuple[Field, ...]
    """Fields whose rows have no bytes."""

    def columns(self) -> Iterator[tuple[Field, list[Array]]]:
        """Fields in order of name, each with its rows in pieces, views of the pages."""
        bodies: list[tuple[Field, list[Array]]] = [(field, []) for field in self.empty]
        for lane, pages in self.lanes:
            bodies += [(field, [page[field.name] for page in pages]) for field in lane.fields]
        yield from sorted(bodies, key=_name)

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
        groups = [*([small] if small else []), *([field] for field in self.fields if field.row_bytes > _SMALL)]
        self._heads = np.zeros((len(groups), num_envs), np.int64)
        self.lanes = [Lane(group, heads) for group, heads in zip(groups, self._heads, strict=True)]
        """Where the rows are."""
        self._with_first = with_first
        self._num_envs = num_envs
        self._copied = [field for lane in self.lanes for field in lane.fields]
        self._sizes = np.array([(lane.page_rows, lane.width) for lane in self.lanes], np.int64).reshape(-1, 2)
        self._places = np.array(
            [
                (not sources[field.name][1], field.row_bytes, number, offset)
                for number, lane in enumerate(self.lanes)
                for field, offset in zip(lane.fields, lane.offsets, strict=True)
            ],
            np.int64,
        ).reshape(-1, 4)
        self._share = _SHARE // max(1, sum(lane.width for lane in self.lanes)) + 1
        self._addresses = np.empty(len(self._copied), np.int64)
        self._starts = np.empty((len(self.lanes) * num_envs, 2), np.int64)

    @property
    def empty(self) -> tuple[Field, ...]:
        """The fields whose rows have no bytes, and which need no memory."""
        return tuple([field for field in self.fields if not field.row_bytes])

    def take(self, slot: int, length: int) -> list[tuple[Lane, list[Array]]]:
        """Hand over the rows of an environment whose episode has ``length`` steps, and forget them."""
        return [(lane, lane.take(slot, length + self._with_first)) for lane in self.lanes]

    def write(self, sources: Sources, slots: Index, rows: Index, at: Index) -> None:
        """Copy rows of environments ``slots``, which are ``rows`` of the record, to rows ``at`` of their episodes."""
        for field in self.fields:
            self._check(field, sources[field.name], rows)
        # what is copied here must live until the end of the call
        kept = [np.ascontiguousarray(sources[field.name][0]) for field in self._copied]
        self._addresses[:] = [_address(values) for values in kept]
        slots, rows, at = (np.ascontiguousarray(index, np.int64) for index in (slots, rows, at))
        count = find_starts(slots, at, self._sizes, self._heads, self._starts)
        assert count >= 0, "a row without the rows before it"
        for lane, slot in self._starts[:count].tolist():
            self.lanes[lane].begin_page(slot)
        put_rows(slots, rows, at, self._addresses, self._places, self._sizes, self._heads, self._share)

    def _check(self, field: Field, source: tuple[Array, bool], rows: Index) -> None:
        values, per_env = source
        if values.dtype != field.dtype or values.shape[1:] != field.shape:
            raise DataError(
                f"{field.name}: expected rows of {field.dtype}{field.shape} as in the first step, got "
                f"{values.dtype}{tuple(values.shape[1:])}; an episode's dtype and shape must not change"
            )
        if len(values) != self._num_envs if per_env else len(rows) and rows[-1] >= len(values):
            expected = f"a row for each of {self._num_envs} environments" if per_env else "a row per environment"
            raise DataError(f"{field.name}: expected {expected}, got {len(values)}")
