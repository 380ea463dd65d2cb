"""Batches without ``("next", observation)``: compact, as TorchRL's ``compact_obs`` collects them, and as deltas.

Three forms of the same data, each with its price:

- :class:`headrace.replay.ReplayBuffer`: every frame once, exact everywhere, with every sampler and n-step.
- compact: half the size of usual batches. The next observation is taken from the following entry of the *same batch*,
  so it is missing at ends, at the last entry, and nearly everywhere in a randomly sampled batch.
- delta: next observations as differences to the observation, as TorchRL's ``NextObservationDelta`` has it; present
  everywhere, larger than compact, and rounded. A float32 pair of observations becomes a float32 and a float16: three
  quarters of the size, with an error of three roundings to nearest. Pictures are kept exact as int16, which makes them
  *larger*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from headrace._leaves import SEPARATOR
from headrace.errors import ConfigError, DataError, DtypeError

if TYPE_CHECKING:
    from tensordict import TensorDict

_KEPT = ("reward", "done", "terminated", "truncated", "cut")
Key = str | tuple[str, ...]
DeltaDtype = torch.dtype | Mapping[str, torch.dtype]


def drop_next(batch: TensorDict) -> TensorDict:
    """Return the batch without its next observations; reward and flags stay. Tensors are shared with ``batch``."""
    out, after = batch.copy(), node(batch, "next")
    out["next"] = after.select(*(name for name in _KEPT if name in after.keys()))  # noqa: SIM118  (not a dict)
    return out


def node(batch: TensorDict, key: str) -> TensorDict:
    """Return a nested ``TensorDict``; :class:`DataError` where the key is missing or is a tensor."""
    value = batch.get(key, None)
    if value is None or isinstance(value, Tensor):
        raise DataError(f"batch: expected a nested {key!r}, got {'nothing' if value is None else 'a tensor'}")
    return cast("TensorDict", value)


def reconstruct_next(
    batch: TensorDict,
    *,
    fill_value: float = math.nan,
    traj_key: Key | None = ("collector", "traj_ids"),
    strict: bool = True,
    n_step: int = 1,
) -> TensorDict:
    """Put next observations back into a compact batch, from the following entry along its last batch axis.

    An entry's next observation is the observation of the entry after it, where that is the next step of the same
    trajectory: the same ``("collector", "traj_ids")``, not done, and ``step_count`` one higher (two slices of one
    trajectory that happen to lie side by side are not joined). Everywhere else it is ``fill_value``.

    Args:
        batch: with ``observation``, ``("collector", "traj_ids")``, ``step_count`` and ``("next", "done")``.
        traj_key: where the trajectory ids are; None: the whole axis is one trajectory, which only done ends.
        strict: refuse a batch without ``step_count`` or trajectory ids. Otherwise what is there is compared, as TorchRL
            does: without ``step_count``, two slices of one trajectory side by side are joined.
        fill_value: for entries whose successor is not there. NaN by default; integer observations need a number.
        n_step: only 1 can be had from this form.

    Returns:
        A batch that shares everything else with the given one. See :class:`headrace.replay.ReplayBuffer` for a store
        that needs no filling, and :func:`headrace.replay.forms.to_delta` for differences.
    """
    if n_step != 1:
        raise ConfigError(
            f"reconstruct_next: n_step={n_step} cannot be had from compact batches: the observation n steps later is "
            "rarely in the batch, and rewards between are lost; use ReplayBuffer(n_step=…)"
        )
    wanted: list[Key] = [("next", "done"), *((traj_key,) if traj_key is not None else ())]
    wanted += ["step_count"] if traj_key is not None else []
    found = {key: batch.get(key, None) for key in wanted}
    for key, value in found.items():
        if value is None and (strict or key == ("next", "done")):
            raise DataError(
                f"reconstruct_next: expected {key!r} in the batch; without it neighbors cannot be told apart. "
                "strict=False compares what is there"
            )
    axis = batch.dim() - 1
    if axis < 0 or batch.shape[axis] == 0:
        raise DataError(f"reconstruct_next: expected a batch with entries, got shape {tuple(batch.shape)}")
    joined = torch.zeros(batch.shape, dtype=torch.bool)
    last = batch.shape[axis] - 1
    inside = joined.narrow(axis, 0, last)
    for key, value in found.items():
        if value is not None:
            marks = cast("Tensor", value).reshape(batch.shape)
            here, there = marks.narrow(axis, 0, last), marks.narrow(axis, 1, last)
            if key == ("next", "done"):
                inside.copy_(~here)
            else:
                inside &= (here + 1 if key == "step_count" else here) == there
    out = batch.copy()
    out["next"] = node(batch, "next").copy()
    out["next", "observation"] = _fill(batch["observation"], joined, axis, fill_value)
    return out


def _fill(obs: Tensor | TensorDict, joined: Tensor, axis: int, fill_value: float) -> Tensor | TensorDict:
    if not isinstance(obs, Tensor):
        return cast("TensorDict", obs.apply(partial(_fill, joined=joined, axis=axis, fill_value=fill_value)))
    dtype = cast("torch.dtype", obs.dtype)
    if not dtype.is_floating_point and (math.isnan(fill_value) or fill_value != int(fill_value)):
        raise DtypeError(
            f"reconstruct_next: expected a whole number as fill_value for {dtype} observations, got {fill_value}; "
            "choose one, or keep the frames in a ReplayBuffer, which has nothing to fill"
        )
    moved = torch.roll(obs, -1, dims=axis)
    mask = joined.reshape(*joined.shape, *([1] * (obs.dim() - joined.dim())))
    return torch.where(mask, moved, torch.full((), fill_value, dtype=dtype))


def to_delta(batch: TensorDict, *, delta_dtype: DeltaDtype = torch.float16) -> TensorDict:
    """Replace ``("next", "observation")`` by ``("next", "delta")`` = next − observation, in a smaller dtype.

    Args:
        batch: with ``observation`` and ``("next", "observation")``, tensors or groups of them.
        delta_dtype: dtype of the differences, or one per group, also for what is nested in it. uint8 observations take
            int16, which is exact; anything else is refused for them.

    Returns:
        A batch that shares everything else with the given one; :func:`from_delta` undoes it. See
        :func:`headrace.replay.forms.reconstruct_next` and :class:`headrace.replay.ReplayBuffer` for the other forms.
    """
    out = drop_next(batch)
    obs, following = batch["observation"], batch["next", "observation"]
    if isinstance(obs, Tensor):
        if isinstance(delta_dtype, Mapping):
            raise ConfigError("to_delta: delta_dtype by group, but the observation is one tensor; give one dtype")
        out["next", "delta"] = difference(obs, following, delta_dtype, "observation")
        return out

    def group(name: str | tuple[str, ...], here: Tensor, there: Tensor) -> Tensor:
        path = (name,) if isinstance(name, str) else name
        dtype = delta_dtype.get(path[0], torch.float16) if isinstance(delta_dtype, Mapping) else delta_dtype
        return difference(here, there, dtype, SEPARATOR.join(path))

    out["next", "delta"] = obs.named_apply(group, following, nested_keys=True)
    return out


def from_delta(batch: TensorDict, *, n_step: int = 1) -> TensorDict:
    """Put next observations back: observation + delta, in the dtype of the observation.

    ``n_step`` > 1 is refused: the deltas between are not in the batch.
    """
    if n_step != 1:
        raise ConfigError(
            f"from_delta: n_step={n_step} cannot be had from differences: those of the steps between are not in the "
            "batch; use ReplayBuffer(n_step=…)"
        )
    delta = node(batch, "next").get("delta", None)
    if delta is None:
        raise DataError("from_delta: expected ('next', 'delta') in the batch; make it with to_delta")
    out = batch.copy()
    out["next"] = node(batch, "next").exclude("delta")
    obs = batch["observation"]
    whole = isinstance(obs, Tensor)
    out["next", "observation"] = restore(obs, cast("Tensor", delta)) if whole else obs.apply(restore, delta)
    return out


def difference(obs: Tensor, following: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Next − observation in ``dtype``, refused where that cannot hold it; ``name`` is for the message."""
    if obs.dtype == torch.uint8:
        if dtype != torch.int16:
            raise DtypeError(
                f"to_delta: {name!r} is uint8; expected delta_dtype torch.int16, which keeps it exact, got {dtype}; "
                "a ReplayBuffer keeps pictures exact in a third of that"
            )
        return following.to(torch.int16) - obs.to(torch.int16)
    if not obs.dtype.is_floating_point or not dtype.is_floating_point:
        raise DtypeError(
            f"to_delta: {name!r}: expected floating point observations and delta_dtype, got {obs.dtype}, {dtype}"
        )
    delta = (following - obs).to(dtype)
    if bool((delta.isinf() & ~(following - obs).isinf()).any()):
        raise DtypeError(f"to_delta: {name!r} changes by more than {dtype} can hold; use torch.float32")
    return delta


def restore(obs: Tensor, delta: Tensor) -> Tensor:
    """Return the next observation, in the dtype of the observation."""
    if obs.dtype == torch.uint8:
        return (obs.to(torch.int16) + delta).to(torch.uint8)
    return obs + delta.to(obs.dtype)
