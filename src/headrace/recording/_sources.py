"""Where each recorded field of a reset and of a step comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor

from headrace._device import to_host
from headrace._leaves import Path as LeafPath
from headrace._leaves import leaves
from headrace.errors import DataError
from headrace.recording._fields import Array, as_array, choose_observations
from headrace.types import Obs, ResetRecord, Step, StepInfo, StepRecord

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

    def reset_on_host(self, record: ResetRecord) -> ResetRecord:
        """The record with what is read of it on the CPU: one copy from a GPU."""
        if record.env_ids.is_cpu:
            return record
        given = {"env_ids": record.env_ids, "episode_ids": record.episode_ids, **self._chosen(record.obs)}
        if record.states is not None:
            given["states"] = record.states
        found = to_host(given)
        return replace(
            record,
            env_ids=found["env_ids"],
            episode_ids=found["episode_ids"],
            obs=self._named(found),
            states=found.get("states"),
        )

    def step_on_host(self, record: StepRecord, substeps: Tensor | None) -> tuple[StepRecord, Tensor | None]:
        """The same of a step, and the states of its substeps (n, decimation, S)."""
        step, info = record.step, record.step.info
        if record.env_ids.is_cpu and step.reward.is_cpu:
            return record, substeps
        ends, final = info.get("ends"), info.get("final_obs")
        if final is step.obs or "_final_obs" not in info:
            final = None
        maybe = {
            "actions": record.actions if "actions" in self._choice else None,
            "states": record.states,
            "processed_actions": record.processed_actions,
            "substeps": substeps,
            "ends": None if ends is None else ends.env_ids,
            "success": None if ends is None else ends.success,
            "diverged": None if ends is None else ends.diverged,
            "mask": None if final is None else info.get("_final_obs"),
        }
        found = to_host(
            {
                "env_ids": record.env_ids,
                "episode_ids": record.episode_ids,
                "reward": step.reward,
                "terminated": step.terminated,
                "truncated": step.truncated,
                **{name: values for name, values in maybe.items() if values is not None},
                **self._chosen(step.obs),
                **{f"final {name}": values for name, values in self._chosen(final).items()},
            }
        )
        told: StepInfo = {}
        if ends is not None:
            told["ends"] = replace(
                ends, env_ids=found["ends"], success=found.get("success"), diverged=found["diverged"]
            )
        if final is not None:
            told["final_obs"], told["_final_obs"] = self._named(found, "final "), found["mask"]
        host = Step(self._named(found), found["reward"], found["terminated"], found["truncated"], told)
        return replace(
            record,
            env_ids=found["env_ids"],
            episode_ids=found["episode_ids"],
            actions=found.get("actions", record.actions),
            step=host,
            states=found.get("states"),
            processed_actions=found.get("processed_actions"),
        ), found.get("substeps")

    def _chosen(self, obs: Obs | None) -> dict[str, Tensor]:
        return {} if obs is None else {name: _leaf(obs, path) for name, path in self._observations}

    def _named(self, found: Mapping[str, Tensor], prefix: str = "") -> Obs:
        """The observations among ``found`` whose names begin so, nested as they were."""
        tree: dict[Any, Any] = {}
        for name, path in self._observations:
            *above, last = path
            branch = tree
            for key in above:
                branch = branch.setdefault(key, {})
            branch[last] = found[f"{prefix}{name}"]
        return tree

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

    def of_act(self, record: StepRecord, substeps: Tensor | None) -> Sources:
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


def _leaf(obs: Any, path: LeafPath) -> Any:
    for key in path:
        obs = obs[key]
    return obs


def _follow(obs: Any, path: LeafPath, name: str) -> Array:
    return as_array(_leaf(obs, path), name)


def _given(name: str, values: Tensor | Array | None, advice: str) -> Array:
    if values is None:
        raise DataError(f"fields: {name!r} was chosen, but the environment gives none; {advice}")
    return as_array(values, name)
