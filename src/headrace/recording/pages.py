"""The rows of running episodes, in pages that grow with the episode and leave with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.recording.episode_file import EpisodeMeta
from headrace.recording.fields import Array, Field
from headrace.recording.store import Group

Bytes = NDArray[np.uint8]

_PAGE_BYTES = 1 << 16
_PAGE_STEPS = 64
_SMALL = 1024
"""Rows up to this size are packed side by side: one copy a step and environment instead of one a field."""


class Lane:
    """Rows of one large field, or of all small fields side by side; owns the pages of every environment."""

    def __init__(self, fields: Sequence[Field], num_envs: int) -> None:
        self.fields = tuple(fields)
        self.dtype = np.dtype([(field.name, field.dtype, field.shape) for field in fields])
        self.width = self.dtype.itemsize
        self.columns: dict[str, slice] = {}
        """Which bytes of a packed row are whose."""
        start = 0
        for field in fields:
            self.columns[field.name] = slice(start, start + field.row_bytes)
            start += field.row_bytes
        self.page_steps = max(1, min(_PAGE_STEPS, _PAGE_BYTES // self.width))
        self._pages: list[list[Bytes]] = [[] for _ in range(num_envs)]

    def write(self, slots: Iterable[int], steps: Iterable[int], rows: Bytes, index: Iterable[int]) -> None:
        """Copy ``rows[index[k]]`` (uint8, width) to step ``steps[k]`` of environment ``slots[k]``."""
        page_steps, width, pages = self.page_steps, self.width, self._pages
        for slot, step, row in zip(slots, steps, index, strict=True):
            number, offset = divmod(step, page_steps)
            held = pages[slot]
            if number == len(held):
                held.append(np.empty((page_steps, width), np.uint8))
            held[number][offset] = rows[row]

    def take(self, slot: int) -> list[Bytes]:
        """Hand over an environment's pages and forget them."""
        pages, self._pages[slot] = self._pages[slot], []
        return pages

    def bodies(self, pages: list[Bytes], length: int) -> dict[str, list[Array]]:
        """The rows of each field, in contiguous pieces: the pages themselves, or columns cut out of packed rows."""
        if len(self.fields) == 1:
            full, left = divmod(length, self.page_steps)
            return {self.fields[0].name: [*pages[:full], *([pages[full][:left]] if left else [])]}
        rows = (np.concatenate(pages) if len(pages) > 1 else pages[0])[:length]
        return {name: [rows[:, columns].copy()] for name, columns in self.columns.items()}

    def held_bytes(self) -> int:
        """Memory of all running episodes."""
        return sum(len(held) for held in self._pages) * self.page_steps * self.width


def make_lanes(fields: Iterable[Field], num_envs: int) -> list[Lane]:
    """One lane for all small fields, one for each large one; fields without bytes need none."""
    small = [field for field in fields if 0 < field.row_bytes <= _SMALL]
    large = [field for field in fields if field.row_bytes > _SMALL]
    groups = ([small] if small else []) + [[field] for field in large]
    return [Lane(group, num_envs) for group in groups]


def _name(field: Field) -> str:
    return field.name


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEpisode:
    """An episode on its way to the disk. Owns its rows."""

    meta: EpisodeMeta
    group: Group
    fields: tuple[Field, ...]
    lanes: tuple[tuple[Lane, list[Bytes]], ...]
    """Each lane with this episode's pages of it."""
    extras: dict[str, Array]
    """The one row more that observations (last) and states (first) have."""

    def columns(self) -> Iterator[tuple[Field, list[Array]]]:
        """Fields in order of name, each with its rows in contiguous pieces."""
        bodies: dict[str, list[Array]] = {}
        for lane, pages in self.lanes:
            bodies.update(lane.bodies(pages, self.meta.length))
        for field in sorted(self.fields, key=_name):
            pieces = bodies.get(field.name, [])
            if field.extra == "first":
                pieces = [self.extras[field.name], *pieces]
            elif field.extra == "last":
                pieces = [*pieces, self.extras[field.name]]
            yield field, pieces

    @property
    def held_bytes(self) -> int:
        """Memory of the pages."""
        return sum(page.nbytes for _, pages in self.lanes for page in pages)
