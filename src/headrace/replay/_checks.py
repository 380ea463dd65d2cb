"""The boundary of the stores: what ``extend`` takes, checked once, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from headrace._kernels.gather import Int64s
from headrace._leaves import SEPARATOR
from headrace.errors import ConfigError, DtypeError, LifecycleError, ShapeError
from headrace.replay._pool import Sourced, Write
from headrace.replay._spec import ArraySpec, Leaf, StoreSpec
from headrace.types import Step

NestedObs: TypeAlias = "Tensor | Mapping[str, NestedObs]"
"""One tensor (N, …), or names to such, nested as deep as the space is."""


_NUMBER = ArraySpec((), torch.float32)
_FLAG = ArraySpec((), torch.bool)


def check_transition(
    spec: StoreSpec,
    obs: NestedObs,
    action: Tensor,
    step: Step,
    active: Tensor | None,
    extras: Mapping[str, Tensor],
) -> Write:
    """Check one step of all environments, and find the true last observations.

    What is stored of it is a transition of every environment that acted. Tensors are borrowed from the caller.
    """
    leaves, num_envs = spec.leaves, spec.num_envs
    flat = flatten_obs(leaves, obs, "obs", num_envs)
    flat_next = flatten_obs(leaves, step.obs, "step.obs", num_envs)
    columns = {"action": check_array(action, spec.action, "action", num_envs)}
    if extras.keys() != spec.extras.keys():
        raise ShapeError(f"extras: expected {sorted(spec.extras)}, as declared, got {sorted(extras)}")
    for name, extra in spec.extras.items():
        columns[name] = check_array(extras[name], extra, f"extras[{name!r}]", num_envs)
    reward = check_array(step.reward, _NUMBER, "step.reward", num_envs).numpy()
    terminated = check_array(step.terminated, _FLAG, "step.terminated", num_envs).numpy()
    truncated = check_array(step.truncated, _FLAG, "step.truncated", num_envs).numpy()
    ids: Int64s = np.arange(num_envs)
    if active is not None:
        ids = check_array(active, _FLAG, "active", num_envs).numpy().nonzero()[0]
        reward, terminated, truncated = reward[ids], terminated[ids], truncated[ids]
    done = terminated | truncated
    final = flat_next
    if spec.autoreset == "same_step" and np.count_nonzero(done):
        if "final_obs" not in step.info or "_final_obs" not in step.info:
            raise LifecycleError(
                "step.info: expected final_obs and _final_obs in a step that ends an episode; keep final_obs=True when "
                'you make the environment, or say autoreset="disabled" if step.obs is the last observation itself'
            )
        given = check_array(step.info["_final_obs"], _FLAG, "step.info['_final_obs']", num_envs)
        missing = ids[done & ~given.numpy()[ids]].tolist()
        if missing:
            raise ShapeError(f"step.info['_final_obs']: expected every environment that ended, missing {missing}")
        final = flatten_obs(leaves, step.info["final_obs"], "step.info['final_obs']", num_envs)

    def final_of(which: Int64s) -> Sourced:
        return final, ids[which]

    def next_of(which: Int64s) -> Sourced:
        return flat_next, ids[which]

    return Write(flat, ids, ids, terminated, truncated, reward, columns, final_of, next_of)


def flatten_obs(leaves: tuple[Leaf, ...], obs: NestedObs, what: str, num_envs: int) -> dict[str, Tensor]:
    """Leaf name → (N, …), every leaf present and as declared.

    A store declared over one bare array also takes a dict of one group: environments always give a dict.
    """
    flat: dict[str, Tensor] = {}
    for leaf in leaves:
        found = _find(obs, leaf.path, what)
        flat[leaf.name] = check_array(found, leaf.observed, f"{what}[{leaf.name!r}]" if leaf.name else what, num_envs)
    return flat


def check_array(array: Tensor, spec: ArraySpec, what: str, num_envs: int) -> Tensor:
    """Raise unless ``array`` is contiguous, (N, *spec.shape), of the declared dtype; give it on the CPU.

    A tensor of another device is copied; one on the CPU is borrowed.
    """
    if not isinstance(array, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise DtypeError(f"{what}: expected a torch tensor, got {type(array).__name__}; use torch.as_tensor")
    if array.shape != (num_envs, *spec.shape):
        raise ShapeError(
            f"{what}: expected {(num_envs, *spec.shape)}, got {tuple(array.shape)}; "
            "pass one row per environment, inactive ones included (their rows are ignored)"
        )
    if array.dtype != spec.dtype:
        raise DtypeError(f"{what}: expected {spec.dtype}, got {array.dtype}; convert it, or declare that space")
    if not array.is_contiguous():
        raise ShapeError(f"{what}: expected a contiguous tensor, got strides {array.stride()}; call .contiguous()")
    if array.is_cpu:
        return array
    # pinned where a CUDA device is there to copy faster into it
    return torch.empty(array.shape, dtype=array.dtype, pin_memory=torch.cuda.is_available()).copy_(array)


def check_sizes(capacity: int, num_envs: int) -> None:
    """Raise unless the sizes of a replay buffer can work."""
    if num_envs < 1:
        raise ConfigError(f"num_envs: expected at least 1, got {num_envs}")
    if capacity < num_envs or capacity % num_envs:
        near = max(capacity // num_envs, 1) * num_envs
        raise ConfigError(
            f"capacity: expected a positive multiple of num_envs ({num_envs}), as each environment has a ring of its "
            f"own, got {capacity}; use for example {near}"
        )


def _find(obs: NestedObs, path: tuple[str, ...], what: str) -> Tensor:
    found = obs
    for name in path:
        if isinstance(found, Tensor) or name not in found:
            got = "one tensor" if isinstance(found, Tensor) else sorted(found)
            raise ShapeError(f"{what}: expected an observation named {SEPARATOR.join(path)!r}, got {got}")
        found = found[name]
    if isinstance(found, Mapping) and not path and len(found) == 1:
        found = next(iter(found.values()))
    return cast("Tensor", found)
