"""Where each recorded field of a reset and of a step comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from headrace._leaves import Path as LeafPath
from headrace._leaves import leaves
from headrace.errors import DataError
from headrace.recording._fields import Array, as_array, choose_observations
from headrace.types import Obs, ResetRecord, StepRecord

Sources: TypeAlias = Mapping[str, tuple[Array, bool]]
"""Field → (values, borrowed; whether they have a row per environment, or only per row of the record)."""


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

    def of_reset(self, record: ResetRecord) -> Sources:
        """What there is at the beginning of an episode: observations and states."""
        return self._of_moment(record.obs, record.states, "attach before reset")

    def of_moment(self, record: StepRecord) -> Sources:
        """What there is after a step; where an episode ended, at its end."""
        info = record.step.info
        obs, final, mask = record.step.obs, info.get("final_obs"), info.get("_final_obs")
        found = self._of_moment(obs, record.states, "leave it out")
        if mask is None or final is None or final is obs:
            return found
        # an environment that is not ours shows the new episode already
        ended = as_array(mask, "_final_obs")
        merged = dict(found)
        for name, path in self._observations:
            merged[name] = found[name][0].copy(), True
            merged[name][0][ended] = _follow(final, path, name)[ended]
        return merged

    def of_act(self, record: StepRecord, substeps: Array | None) -> Sources:
        """What belongs to the step itself. ``substeps``: (n, decimation, S) where they are recorded."""
        step = record.step
        found: dict[str, tuple[Array, bool]] = {}
        if "actions" in self._choice:
            found["actions"] = as_array(record.actions, "actions"), True
        if "rewards" in self._choice:
            found["rewards"] = as_array(step.reward, "rewards"), True
        if "flags" in self._choice:
            found["terminated"] = as_array(step.terminated, "terminated"), True
            found["truncated"] = as_array(step.truncated, "truncated"), True
        if "processed_actions" in self._choice:
            found["processed_actions"] = _given("processed_actions", record.processed_actions, "leave it out"), False
        if "substeps" in self._choice:
            found["substeps"] = _given("substeps", substeps, "leave it out"), False
        return found

    def _of_moment(self, obs: Obs, states: Tensor | None, advice: str) -> Sources:
        found = {name: (_follow(obs, path, name), True) for name, path in self._observations}
        if "states" in self._choice:
            found["states"] = _given("states", states, advice), False
        return found


def _follow(obs: Any, path: LeafPath, name: str) -> Array:
    for key in path:
        obs = obs[key]
    return as_array(obs, name)


def _given(name: str, values: Tensor | Array | None, advice: str) -> Array:
    if values is None:
        raise DataError(f"fields: {name!r} was chosen, but the environment gives none; {advice}")
    return as_array(values, name)
