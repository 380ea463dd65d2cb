"""Observations under LeRobot's names, as our export writes them: a policy trained on it reads them as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from headrace.errors import PolicyError
from headrace.types import Obs

_STATE, _IMAGES, _ANY = "observation.state", "observation.images.", "observation."
_MOST_CHANNELS = 4


def lerobot_action_dim(config: object) -> int | None:
    """What a LeRobot configuration says of the size of an action; None where there is no such thing."""
    features: object = getattr(config, "output_features", None)
    action = cast("Mapping[str, object]", features).get("action") if isinstance(features, Mapping) else None
    shape = cast("tuple[int, ...] | None", getattr(action, "shape", None))
    return shape[0] if shape else None


def lerobot_horizon(config: object) -> int | None:
    """Rows of a chunk that ``predict_action_chunk`` gives; None where the configuration does not say.

    A diffusion policy plans ``horizon`` rows from its oldest observation on, and gives ``n_action_steps`` from now on.
    """
    name = "n_action_steps" if hasattr(config, "noise_scheduler_type") else "chunk_size"
    return cast("int | None", getattr(config, name, None))


def lerobot_batch(obs: Obs, policy: object) -> Obs:
    """The groups, and beside them what the policy's ``config.input_features`` name.

    ``observation.state`` is the group ``policy``, ``observation.<group>`` another one, and
    ``observation.images.<group>`` a picture: float32 (…, C, H, W), from uint8 divided by 255.
    """
    wanted: object = getattr(getattr(policy, "config", None), "input_features", None)
    if not isinstance(wanted, Mapping):
        return obs
    named = {key: _named(obs, key) for key in cast("Mapping[str, object]", wanted) if key not in obs}
    return {**obs, **named}


def _named(obs: Obs, key: str) -> Tensor:
    group = "policy" if key == _STATE else key.removeprefix(_IMAGES if key.startswith(_IMAGES) else _ANY)
    if group not in obs:
        raise PolicyError(
            f"policy: its config.input_features has {key!r}, expected a group {group!r} of the environment, got "
            f"{sorted(obs)}; pass a function that renames them and calls predict_action_chunk"
        )
    return _picture(obs[group]) if key.startswith(_IMAGES) else obs[group]


def _picture(rows: Tensor) -> Tensor:
    if rows.shape[-1] <= _MOST_CHANNELS < rows.shape[-3]:
        rows = rows.movedim(-1, -3)
    return rows.to(torch.float32) / 255 if rows.dtype == torch.uint8 else rows
