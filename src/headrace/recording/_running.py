"""The rows of running episodes: where each field of a step comes from, and the pages that its rows go to.

Pages grow with an episode and leave with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace._leaves import flatten
from headrace.errors import ConfigError, DataError
from headrace.recording._episode_file import EpisodeFile, EpisodeMeta
from headrace.recording._fields import Array, Field, as_array, choose_observations
from headrace.recording._store import Group
from headrace.types import StepRecord

Bytes = NDArray[np.uint8]
EpisodeState = NDArray[np.int64]

_PAGE_BYTES = 1 << 16
_PAGE_STEPS = 64
_SMALL = 4096
"""Rows up to this size are packed side by side: one copy a step for all of them instead of one a field."""


class Lane(Protocol):
    """Rows of some fields of every environment's running episode; owns them until they are taken."""

    fields: tuple[Field, ...]

    def take(self, slot: int, length: int) -> list[Bytes]:
        """Hand over the pages of an environment whose episode has ``length`` steps, and forget them."""
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
        self.page_steps = max(1, min(_PAGE_STEPS, _PAGE_BYTES // width))
        self._block: Bytes = np.empty((num_envs, self.page_steps, width), np.uint8)
        # an element is a row: copying it is one call, whatever its fields are
        self._rows: Array = self._block.view(f"V{width}")[:, :, 0]
        self._full: list[list[Bytes]] = [[] for _ in range(num_envs)]

    def write(self, slots: EpisodeState, steps: EpisodeState, rows: Array) -> None:
        """Copy ``rows`` (n,), of the lane's dtype, to steps ``steps`` of environments ``slots``, both (n,)."""
        places = steps % self.page_steps
        self._rows[slots, places] = rows.view(self._rows.dtype)
        for slot in slots[places == self.page_steps - 1].tolist():
            self._full[slot].append(self._block[slot].copy())

    def take(self, slot: int, length: int) -> list[Bytes]:
        """Hand over an environment's pages and forget them."""
        pages, self._full[slot] = self._full[slot], []
        left = length % self.page_steps
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
        self.page_steps = max(1, min(_PAGE_STEPS, _PAGE_BYTES // self.width))
        self._pages: list[list[Bytes]] = [[] for _ in range(num_envs)]

    def write(self, slots: EpisodeState, steps: EpisodeState, rows: Bytes, index: EpisodeState) -> None:
        """Copy ``rows[index[k]]`` (uint8, width) to step ``steps[k]`` of environment ``slots[k]``."""
        page_steps, width, pages = self.page_steps, self.width, self._pages
        for slot, step, row in zip(slots.tolist(), steps.tolist(), index.tolist(), strict=True):
            number, offset = divmod(step, page_steps)
            held = pages[slot]
            if number == len(held):
                held.append(np.empty((page_steps, width), np.uint8))
            held[number][offset] = rows[row]

    def take(self, slot: int, length: int) -> list[Bytes]:
        """Hand over an environment's pages and forget them."""
        pages, self._pages[slot] = self._pages[slot], []
        left = length % self.page_steps
        return [*pages[:-1], pages[-1][:left]] if left else pages

    def drop(self, slot: int) -> None:
        """Forget an environment's rows."""
        self._pages[slot] = []

    def bodies(self, pages: list[Bytes]) -> dict[str, list[Array]]:
        """The pages themselves."""
        return {self.fields[0].name: [*pages]}

    def held_bytes(self) -> int:
        """Memory of all running episodes."""
        return sum(map(len, self._pages)) * self.page_steps * self.width


def make_lanes(fields: Iterable[Field], num_envs: int) -> tuple[PackedLane | None, list[PagedLane]]:
    """One lane for all small fields, one for each large one; fields without bytes need none."""
    fields = tuple(fields)
    small = [field for field in fields if 0 < field.row_bytes <= _SMALL]
    large = [field for field in fields if field.row_bytes > _SMALL]
    return PackedLane(small, num_envs) if small else None, [PagedLane(field, num_envs) for field in large]


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
            bodies.update(lane.bodies(pages))
        for field in sorted(self.fields, key=_name):
            pieces = bodies.get(field.name, [])
            if field.extra == "first":
                pieces = [self.extras[field.name], *pieces]
            elif field.extra == "last":
                pieces = [*pieces, self.extras[field.name]]
            yield field, pieces

    @property
    def held_bytes(self) -> int:
        """Memory of the pages, of which the last may be used in part."""
        return sum((page if page.base is None else page.base).nbytes for _, pages in self.lanes for page in pages)


class StepLayout:
    """Where each field of a step comes from and which lane it goes to."""

    def __init__(self, choice: tuple[str, ...], record: StepRecord, substeps: Array | None, num_envs: int) -> None:
        observations = flatten(record.obs, "obs")
        shapes = {path: tuple(value.shape[1:]) for path, value in observations.items()}
        self._observations = choose_observations(choice, shapes)
        self._choice = choice
        sources = self._sources(record, substeps)
        fields: list[Field] = []
        for name, (values, _) in sources.items():
            extra = "last" if name in self._observations else ("first" if name == "states" else "")
            fields.append(Field(name=name, dtype=values.dtype, shape=tuple(values.shape[1:]), extra=extra))
        self.fields = tuple(fields)
        self._packed, self._paged = make_lanes(fields, num_envs)
        self._everyone = num_envs

    @property
    def lanes(self) -> list[Lane]:
        """Where the rows of running episodes are."""
        return [*([self._packed] if self._packed else []), *self._paged]

    def _sources(self, record: StepRecord, substeps: Array | None) -> dict[str, tuple[Array, bool]]:
        """Field → (values, whether they have a row per environment or only per row that acted)."""
        observations = flatten(record.obs, "obs")
        found: dict[str, tuple[Array, bool]] = {
            name: (as_array(observations[name], name), True) for name in self._observations
        }
        if "actions" in self._choice:
            found["actions"] = as_array(record.actions, "actions"), True
        if "rewards" in self._choice:
            found["rewards"] = as_array(record.step.reward, "rewards"), True
        if "flags" in self._choice:
            found["terminated"] = as_array(record.step.terminated, "terminated"), True
            found["truncated"] = as_array(record.step.truncated, "truncated"), True
        given = {"states": record.states, "processed_actions": record.processed_actions, "substeps": substeps}
        for name, values in given.items():
            if name in self._choice:
                if values is None:
                    raise DataError(f"fields: {name!r} was chosen, but the environment gives none; leave it out")
                found[name] = as_array(values, name), False
        return found

    def write(
        self,
        record: StepRecord,
        substeps: Array | None,
        slots: EpisodeState,
        rows: EpisodeState,
        steps: EpisodeState,
    ) -> None:
        """Copy one step: environments ``slots``, which are ``rows`` of the record, to their steps ``steps``.

        ``substeps`` is (n, decimation, S), the states after each substep, where they are recorded.
        """
        sources = self._sources(record, substeps)
        for field in self.fields:
            self._check(field, sources[field.name][0])
        everyone = len(slots) == self._everyone
        if self._packed is not None:
            packed = np.empty(len(slots), self._packed.dtype)
            for field in self._packed.fields:
                values, per_env = sources[field.name]
                packed[field.name] = values if everyone else values[slots if per_env else rows]
            self._packed.write(slots, steps, packed)
        for lane in self._paged:
            values, per_env = sources[lane.fields[0].name]
            flat = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
            lane.write(slots, steps, flat, slots if per_env else rows)

    def _check(self, field: Field, values: Array) -> None:
        if values.dtype != field.dtype or tuple(values.shape[1:]) != field.shape:
            raise DataError(
                f"{field.name}: expected rows of {field.dtype}{field.shape} as in the first step, got "
                f"{values.dtype}{tuple(values.shape[1:])}; an episode's dtype and shape must not change"
            )

    def extra_rows(self, record: StepRecord, slot: int, first_states: Array | None) -> dict[str, Array]:
        """The true last observation and the first state of an episode that ended; copies."""
        info = record.step.info
        mask = info.get("_final_obs")
        source: Any = info.get("final_obs") if mask is not None and bool(mask[slot]) else record.step.obs
        observations = flatten(source, "obs")
        extras = {name: as_array(observations[name][slot], name).copy() for name in self._observations}
        if first_states is not None:
            extras["states"] = first_states[slot].copy()
        return extras

    def compare(self, path: Path) -> None:
        """Refuse to resume a dataset with other fields."""
        file = EpisodeFile(path)
        there = {name: (file.field(name).dtype, file.field(name).shape) for name in file.names}
        here = {field.name: (field.dtype, field.shape) for field in self.fields}
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise ConfigError(
                    f"resume: {name} is {_say(there.get(name))} in the dataset and {_say(here.get(name))} now; "
                    "record the same fields, or start a new dataset"
                )


def _say(kind: tuple[np.dtype[Any], tuple[int, ...]] | None) -> str:
    return "absent" if kind is None else f"{kind[0]}{kind[1]}"
