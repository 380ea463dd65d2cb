"""The rows of running episodes: the pages that they go to. Pages leave with their episode, and come back from disk.

A *lane* is some fields side by side in a row; every environment has a page of each lane that its newest rows are in,
known by its address. A whole step of all environments is written in one call. The caller keeps pages and sources alive
and the numbers in range: kernels do not check.

Where each recorded field of a reset and of a step comes from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace._device import to_host
from headrace._kernels.compiled import kernel, run
from headrace._leaves import Path as LeafPath
from headrace._leaves import leaves
from headrace.errors import DataError
from headrace.recording._episode_file import EpisodeMeta
from headrace.recording.fields import Array, Field, as_array, choose_observations
from headrace.replay.row_space import Int64s, memcpy
from headrace.types import Obs, ResetRecord, StepRecord

Sources: TypeAlias = Mapping[str, Tensor]
"""Field → values, borrowed."""

Told: TypeAlias = dict[str, Tensor]
"""What a recorder must know of a record beside the fields, on the CPU; borrowed."""

PER_ROW = frozenset({"states", "processed_actions", "substeps"})
"""Fields with a row per row of the record; others have one per environment."""


class FieldSources:
    """Finds the chosen fields in records.

    Args:
        choice: names as in ``RecorderCfg.fields``.
        obs: any observation, for the names and shapes of its groups.
    """

    def __init__(self, choice: tuple[str, ...], obs: Obs) -> None:
        found = {f"obs/{leaf.name}": leaf for leaf in leaves(obs)}
        chosen = choose_observations(choice, {name: tuple(leaf.value.shape[1:]) for name, leaf in found.items()})
        self._observations = [(name, found[name].path) for name in chosen]
        self._choice = frozenset(choice)

    def of_reset(self, record: ResetRecord) -> tuple[Sources, Told]:
        """Return observations and states at the beginning of episodes; ``env_ids`` and ``episode_ids``."""
        found = self._of_moment(record.obs, record.states, "attach before reset")
        return _on_host(found, {"env_ids": record.env_ids, "episode_ids": record.episode_ids})

    def of_step(self, record: StepRecord, substeps: Tensor | None) -> tuple[Sources, Told]:
        """Return what there is after a step, or at the end of an episode, and what belongs to the step itself.

        Beside it the ids as of a reset, ``rewards``, the flags, and where episodes ended their environments, ``ended``,
        with ``diverged`` and, if it is known, ``success``. ``substeps``: (n, decimation, S) where they are recorded.
        """
        step, choice, ends = record.step, self._choice, record.step.info.get("ends")
        found = self._of_moment(step.obs, record.states, "leave it out")
        if "actions" in choice:
            found["actions"] = record.actions
        if "rewards" in choice:
            found["rewards"] = step.reward
        if "flags" in choice:
            found["terminated"], found["truncated"] = step.terminated, step.truncated
        if "processed_actions" in choice:
            found["processed_actions"] = _read_given("processed_actions", record.processed_actions, "leave it out")
        if "substeps" in choice:
            found["substeps"] = _read_given("substeps", substeps, "leave it out")
        told = {
            "env_ids": record.env_ids,
            "episode_ids": record.episode_ids,
            "rewards": step.reward,
            "terminated": step.terminated,
            "truncated": step.truncated,
        }
        if ends is not None:
            told |= {"ended": ends.env_ids, "diverged": ends.diverged}
            if ends.success is not None:
                told["success"] = ends.success
        return _on_host(found, told)

    def _of_moment(self, obs: Obs, states: Tensor | None, advice: str) -> dict[str, Tensor]:
        found = {name: _leaf(obs, path) for name, path in self._observations}
        if "states" in self._choice:
            found["states"] = _read_given("states", states, advice)
        return found


def _on_host(found: dict[str, Tensor], told: Told) -> tuple[Sources, Told]:
    """Return both on the CPU: one copy from a GPU."""
    if all(values.is_cpu for values in told.values()):
        return found, told
    host = to_host({**found, **told})
    return {name: host[name] for name in found}, {name: host[name] for name in told}


def _leaf(obs: Any, path: LeafPath) -> Any:
    for key in path:
        obs = obs[key]
    return obs


def _read_given(name: str, values: Tensor | None, advice: str) -> Tensor:
    if values is None:
        raise DataError(f"fields: {name!r} was chosen, but the environment gives none; {advice}")
    return values


@kernel()
def find_starts(slots: Int64s, steps: Int64s, lanes: Int64s, heads: Int64s, out: Int64s) -> int:
    """Return which lanes and environments need a new page for step ``steps[k]`` of environment ``slots[k]``.

    Args:
        slots: (n,).
        steps: (n,) number of the step in its episode, from 0; -1 for the beginning.
        lanes: (L, 3): rows of a page, bytes of a row, whether there is a row for the beginning.
        heads: (L, N) address of the newest page, 0 without one.
        out: (L · n, 2) receives lane and environment.

    Returns:
        How many; -1 if a row in the middle of a page has none.
    """
    count = 0
    for lane in range(lanes.shape[0]):
        for k in range(slots.shape[0]):
            if (steps[k] + lanes[lane, 2]) % lanes[lane, 0] == 0:
                out[count, 0], out[count, 1] = lane, slots[k]
                count += 1
            elif heads[lane, slots[k]] == 0:
                return -1
    return count


@kernel()
def _put_rows(
    start: int, stop: int, slots: Int64s, rows: Int64s, steps: Int64s, sources: Int64s, fields: Int64s,
    lanes: Int64s, heads: Int64s,
) -> None:  # fmt: skip
    """Copy every field of environment ``slots[k]`` to the row of step ``steps[k]`` of its episode.

    Args:
        start: the first k.
        stop: the k after the last.
        slots: (n,) distinct.
        rows: (n,) where a source has a row per environment of the record instead of one per environment.
        steps: (n,), -1 for the beginning of an episode.
        sources: (F,) addresses of contiguous rows.
        fields: (F, 4): whether rows are those of the record, bytes of a row, lane, offset in the lane's row.
        lanes: (L, 3): rows of a page, bytes of a row, whether there is a row for the beginning.
        heads: (L, N) address of the newest page.
    """
    for k in range(start, stop):  # the fields of a row lie side by side: it is brought near once
        for field in range(fields.shape[0]):
            of_record, width, lane, offset = fields[field, 0], fields[field, 1], fields[field, 2], fields[field, 3]
            page_rows, row_bytes, first = lanes[lane, 0], lanes[lane, 1], lanes[lane, 2]
            row = rows[k] if of_record else slots[k]
            place = heads[lane, slots[k]] + ((steps[k] + first) % page_rows) * row_bytes + offset
            memcpy(place, sources[field] + row * width, width)


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
    """

    def __init__(self, fields: Sequence[Field], num_envs: int) -> None:
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
        self._pages: list[list[Array]] = [[] for _ in range(num_envs)]
        self._spare: deque[Array] = deque()

    def begin_page(self, slot: int) -> int:
        """Give an environment a page for its next rows; returns its address."""
        try:
            page = self._spare.pop()
        except IndexError:
            page = np.empty(self.page_rows, self._dtype)
        self._pages[slot].append(page)
        return _address(page)

    def take(self, slot: int, count: int) -> list[Array]:
        """Hand over the pages of an environment whose episode has ``count`` rows, and forget them."""
        pages, self._pages[slot] = self._pages[slot], []
        left = count % self.page_rows
        return [*pages[:-1], pages[-1][:left]] if left else pages

    def drop(self, slot: int) -> None:
        """Forget an environment's rows."""
        pages, self._pages[slot] = self._pages[slot], []
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
    """Return the page that a page used in part is the beginning of."""
    return page if page.base is None else page.base


def _name(column: tuple[Field, list[Array]]) -> str:
    return column[0].name


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEpisode:
    """An episode on its way to the disk. Owns its rows."""

    meta: EpisodeMeta
    lanes: tuple[tuple[Lane, list[Array]], ...]
    """Each lane with this episode's pages of it."""
    empty: tuple[Field, ...]
    """Fields whose rows have no bytes."""

    def columns(self) -> Iterator[tuple[Field, list[Array]]]:
        """Yield fields in order of name, each with its rows in pieces, views of the pages."""
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


class _Column:
    """Where a field's rows are found. A source is checked whole where it looks different from that of the last step."""

    def __init__(self, field: Field, num_envs: int) -> None:
        self.field = field
        self._num_envs = num_envs
        self._dtype: torch.dtype | None = None
        self._shape = torch.Size()

    def find(self, value: Tensor, least: int, kept: list[Array]) -> int:
        """Address of the rows of a source, of which ``least`` are read at the least; ``kept`` keeps a copy alive."""
        if (
            value.dtype == self._dtype
            and value.shape == self._shape
            and value.shape[0] >= least
            and value.is_contiguous()
            and value.is_cpu
        ):
            return value.data_ptr()
        field, values = self.field, as_array(value, self.field.name)
        if values.dtype != field.dtype or values.shape[1:] != field.shape:
            raise DataError(
                f"{field.name}: expected rows of {field.dtype}{field.shape} as in the first step, got "
                f"{values.dtype}{tuple(values.shape[1:])}; an episode's dtype and shape must not change"
            )
        per_row = field.name in PER_ROW
        if len(values) < least if per_row else len(values) != self._num_envs:
            expected = "per environment" if per_row else f"for each of {self._num_envs} environments"
            raise DataError(f"{field.name}: expected a row {expected}, got {len(values)}")
        self._dtype, self._shape = value.dtype, value.shape
        kept.append(np.ascontiguousarray(values))
        return _address(kept[-1])


class RunningRows:
    """The fields of every environment's running episode: what there is at a moment, then what belongs to a step.

    Args:
        num_envs: environments.
        moments: fields with a row at the beginning of an episode and after every step.
    """

    def __init__(self, num_envs: int, moments: Sources) -> None:
        self._num_envs = num_envs
        self.fields: tuple[Field, ...] = ()
        self.lanes: list[Lane] = []
        """Where the rows are."""
        self._columns: list[_Column] = []
        self._empty: list[_Column] = []
        self._heads = np.empty((0, num_envs), np.int64)
        self._sizes = np.empty((0, 3), np.int64)
        self._places = np.empty((0, 4), np.int64)
        self._add(moments, with_first=True)
        self._moments = len(self._columns), len(self.lanes)

    def add_acts(self, sources: Sources) -> None:
        """Take the other fields, with one row per step, as well."""
        known = {field.name for field in self.fields}
        self._add({name: value for name, value in sources.items() if name not in known}, with_first=False)

    def _add(self, sources: Sources, *, with_first: bool) -> None:
        arrays = {name: as_array(value, name) for name, value in sources.items()}
        fields = [
            Field(name=name, dtype=values.dtype, shape=tuple(values.shape[1:]), with_first=with_first)
            for name, values in arrays.items()
        ]
        small = [field for field in fields if 0 < field.row_bytes <= _SMALL]
        groups = [*([small] if small else []), *([field] for field in fields if field.row_bytes > _SMALL)]
        lanes = [Lane(group, self._num_envs) for group in groups]
        places = [
            (field.name in PER_ROW, field.row_bytes, number, offset)
            for number, lane in enumerate(lanes, start=len(self.lanes))
            for field, offset in zip(lane.fields, lane.offsets, strict=True)
        ]
        sizes = [(lane.page_rows, lane.width, with_first) for lane in lanes]
        self.fields += tuple(fields)
        self.lanes += lanes
        self._columns += [_Column(field, self._num_envs) for lane in lanes for field in lane.fields]
        self._empty += [_Column(field, self._num_envs) for field in fields if not field.row_bytes]
        self._heads = np.concatenate([self._heads, np.zeros((len(lanes), self._num_envs), np.int64)])
        self._sizes = np.concatenate([self._sizes, np.array(sizes, np.int64).reshape(-1, 3)])
        self._places = np.concatenate([self._places, np.array(places, np.int64).reshape(-1, 4)])
        self._share = _SHARE // max(1, sum(lane.width for lane in self.lanes)) + 1
        self._addresses = np.empty(len(self._columns), np.int64)
        self._starts = np.empty((len(self.lanes) * self._num_envs, 2), np.int64)

    def finish(self, slot: int, meta: EpisodeMeta) -> FinishedEpisode:
        """Hand over the rows of an environment whose episode has ended, and forget them."""
        self._heads[:, slot] = 0
        return FinishedEpisode(
            meta=meta,
            lanes=tuple([(lane, lane.take(slot, lane.fields[0].rows(meta.length))) for lane in self.lanes]),
            empty=tuple([column.field for column in self._empty]),
        )

    def drop(self, slot: int) -> None:
        """Forget an environment's rows."""
        self._heads[:, slot] = 0
        for lane in self.lanes:
            lane.drop(slot)

    def write_first(self, moments: Sources, slots: Index, rows: Index) -> None:
        """Copy the rows that episodes begin with: environments ``slots``, which are ``rows`` of the record."""
        columns, lanes = self._moments
        self._write(moments, columns, lanes, slots, rows, np.full(len(slots), -1))

    def write(self, sources: Sources, slots: Index, rows: Index, steps: Index) -> None:
        """Copy step ``steps`` of the episodes in environments ``slots``, which are ``rows`` of the record."""
        self._write(sources, len(self._columns), len(self.lanes), slots, rows, steps)

    def _write(self, sources: Sources, columns: int, lanes: int, slots: Index, rows: Index, steps: Index) -> None:
        least = int(rows[-1]) + 1 if len(rows) else 0
        kept: list[Array] = []
        addresses, heads, sizes = self._addresses[:columns], self._heads[:lanes], self._sizes[:lanes]
        addresses[:] = [column.find(sources[column.field.name], least, kept) for column in self._columns[:columns]]
        for column in self._empty:
            if column.field.name in sources:
                column.find(sources[column.field.name], least, kept)
        count = find_starts(slots, steps, sizes, heads, self._starts)
        assert count >= 0, "a row without the rows before it"
        for lane, slot in self._starts[:count].tolist():
            heads[lane, slot] = self.lanes[lane].begin_page(slot)
        places = self._places[:columns]
        run(_put_rows, len(slots), slots, rows, steps, addresses, places, sizes, heads, min_rows=self._share)
