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

Sources: TypeAlias = "Mapping[str, Tensor | Array]"
"""Field → values, borrowed."""

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

    def of_step(self, record: StepRecord, substeps: Tensor | None) -> Sources:
        """What there is after a step, or at the end of an episode, and what belongs to the step itself.

        ``substeps``: (n, decimation, S) where they are recorded.
        """
        step, choice = record.step, self._choice
        found = self._of_moment(step.obs, record.states, "leave it out")
        final, mask = step.info.get("final_obs"), step.info.get("_final_obs")
        if mask is not None and final is not None and final is not step.obs:
            # an environment that is not ours shows the new episode already
            ended = as_array(mask, "_final_obs")
            for name, path in self._observations:
                found[name] = merged = as_array(found[name], name).copy()
                merged[ended] = as_array(_leaf(final, path), name)[ended]
        if "actions" in choice:
            found["actions"] = record.actions
        if "rewards" in choice:
            found["rewards"] = step.reward
        if "flags" in choice:
            found["terminated"], found["truncated"] = step.terminated, step.truncated
        if "processed_actions" in choice:
            found["processed_actions"] = _given("processed_actions", record.processed_actions, "leave it out")
        if "substeps" in choice:
            found["substeps"] = _given("substeps", substeps, "leave it out")
        return found

    def _of_moment(self, obs: Obs, states: Tensor | None, advice: str) -> dict[str, Tensor | Array]:
        found: dict[str, Tensor | Array] = {name: _leaf(obs, path) for name, path in self._observations}
        if "states" in self._choice:
            found["states"] = _given("states", states, advice)
        return found


def _leaf(obs: Any, path: LeafPath) -> Any:
    for key in path:
        obs = obs[key]
    return obs


def _given(name: str, values: Tensor | None, advice: str) -> Tensor:
    if values is None:
        raise DataError(f"fields: {name!r} was chosen, but the environment gives none; {advice}")
    return values
