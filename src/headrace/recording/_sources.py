"""Where each recorded field of a reset and of a step comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headrace._device import to_host
from headrace._leaves import Path as LeafPath
from headrace._leaves import leaves
from headrace.errors import DataError
from headrace.recording.fields import Array, as_array, choose_observations
from headrace.types import Obs, ResetRecord, StepRecord

Sources: TypeAlias = "Mapping[str, Tensor | Array]"
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
        final, mask = step.info.get("final_obs"), step.info.get("_final_obs")
        if mask is not None and final is not None and final is not step.obs:
            # an environment that is not ours shows the new episode already
            for name, path in self._observations:
                found[name] = _merged(name, found[name], _leaf(final, path), mask)
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
        told = {
            "env_ids": record.env_ids,
            "episode_ids": record.episode_ids,
            # an environment that is not ours may give arrays
            "rewards": torch.as_tensor(step.reward),
            "terminated": torch.as_tensor(step.terminated),
            "truncated": torch.as_tensor(step.truncated),
        }
        if ends is not None:
            told |= {"ended": ends.env_ids, "diverged": ends.diverged}
            if ends.success is not None:
                told["success"] = ends.success
        return _on_host(found, told)

    def _of_moment(self, obs: Obs, states: Tensor | None, advice: str) -> dict[str, Tensor | Array]:
        found: dict[str, Tensor | Array] = {name: _leaf(obs, path) for name, path in self._observations}
        if "states" in self._choice:
            found["states"] = _given("states", states, advice)
        return found


def _on_host(found: dict[str, Tensor | Array], told: Told) -> tuple[Sources, Told]:
    """Return both on the CPU: one copy from a GPU."""
    if all(values.is_cpu for values in told.values()):
        return found, told
    host = to_host({**{name: values for name, values in found.items() if isinstance(values, Tensor)}, **told})
    return {name: host.get(name, values) for name, values in found.items()}, {name: host[name] for name in told}


def _merged(name: str, shown: Tensor | Array, last: Tensor | Array, mask: Tensor | Array) -> Tensor | Array:
    """``shown`` (N, …) with the rows of ``last`` where ``mask`` is set; fresh. Each may be a tensor or an array."""
    if (
        isinstance(shown, Tensor)
        and isinstance(last, Tensor)
        and isinstance(mask, Tensor)
        and shown.device == last.device == mask.device
    ):
        return torch.where(mask.bool().view(-1, *[1] * (shown.ndim - 1)), last.to(shown.dtype), shown)
    merged, ended = as_array(shown, name).copy(), as_array(mask, "_final_obs").astype(np.bool_)
    merged[ended] = as_array(last, name)[ended]
    return merged


def _leaf(obs: Any, path: LeafPath) -> Any:
    for key in path:
        obs = obs[key]
    return obs


def _given(name: str, values: Tensor | None, advice: str) -> Tensor:
    if values is None:
        raise DataError(f"fields: {name!r} was chosen, but the environment gives none; {advice}")
    return values
