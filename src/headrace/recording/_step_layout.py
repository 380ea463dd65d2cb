"""From a step's record to the pages of its episodes: which tensor each field comes from and where its rows go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headrace._leaves import flatten
from headrace.errors import ConfigError, DataError
from headrace.recording._episode_file import EpisodeFile
from headrace.recording._fields import Array, Field, as_array, choose_observations
from headrace.recording._pages import EpisodeState, Lane, make_lanes
from headrace.types import StepRecord


class StepLayout:
    """Where each field of a step comes from and which lane it goes to."""

    def __init__(self, choice: tuple[str, ...], record: StepRecord, num_envs: int) -> None:
        observations = flatten(record.obs, "obs")
        shapes = {path: tuple(value.shape[1:]) for path, value in observations.items()}
        self._observations = choose_observations(choice, shapes)
        self._choice = choice
        sources = self._sources(record)
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

    def _sources(self, record: StepRecord) -> dict[str, tuple[Array, bool]]:
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
        for name, values in (("states", record.states), ("processed_actions", record.processed_actions)):
            if name in self._choice:
                if values is None:
                    raise DataError(f"fields: {name!r} was chosen, but the environment gives none; leave it out")
                found[name] = as_array(values, name), False
        return found

    def write(self, record: StepRecord, slots: EpisodeState, rows: EpisodeState, steps: EpisodeState) -> None:
        """Copy one step: environments ``slots``, which are ``rows`` of the record, to their steps ``steps``."""
        sources = self._sources(record)
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
