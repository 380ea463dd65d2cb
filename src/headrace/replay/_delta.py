"""The delta form: next observations as differences to the observation, as TorchRL's ``NextObservationDelta`` has it.

The price: rounding. A float32 pair of observations becomes a float32 and a float16: three quarters of the size, and an
error bound that :func:`delta_error_bound` gives exactly. Pictures are kept exact as int16, which makes them *larger*.
Exact and smaller: :class:`headrace.replay.ReplayBuffer`. Smaller, but with holes:
:func:`headrace.replay.reconstruct_next`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from headrace._leaves import SEPARATOR
from headrace.errors import ConfigError, DataError, DtypeError
from headrace.replay._compact import drop_next, node

if TYPE_CHECKING:
    from tensordict import TensorDict

DeltaDtype = torch.dtype | Mapping[str, torch.dtype]


def to_delta(batch: TensorDict, *, delta_dtype: DeltaDtype = torch.float16) -> TensorDict:
    """Replace ``("next", "observation")`` by ``("next", "delta")`` = next − observation, in a smaller dtype.

    Args:
        batch: with ``observation`` and ``("next", "observation")``, tensors or groups of them.
        delta_dtype: dtype of the differences, or one per group, also for what is nested in it. uint8 observations take
            int16, which is exact; anything else is refused for them.

    Returns:
        A batch that shares everything else with the given one; :func:`from_delta` undoes it. See
        :func:`headrace.replay.reconstruct_next` and :class:`headrace.replay.ReplayBuffer` for the other forms.
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


def delta_error_bound(obs: Tensor, next_obs: Tensor, delta_dtype: torch.dtype = torch.float16) -> Tensor:
    """Largest possible |restored − next_obs|, elementwise, float64.

    Three roundings to nearest, each by at most half a unit in the last place of its result: of the difference in the
    dtype of the observation, of that in ``delta_dtype``, and of the sum. 0 where everything is an integer.
    """
    if not obs.dtype.is_floating_point:
        return torch.zeros(obs.shape, dtype=torch.float64)
    difference = next_obs - obs
    small = difference.to(delta_dtype)
    restored = obs + small.to(obs.dtype)
    return 0.5 * (_spacing(difference) + _spacing(small) + _spacing(restored))


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
    """The next observation, in the dtype of the observation."""
    if obs.dtype == torch.uint8:
        return (obs.to(torch.int16) + delta).to(torch.uint8)
    return obs + delta.to(obs.dtype)


def _spacing(value: Tensor) -> Tensor:
    """Distance between numbers of this dtype at |value|, float64: 2^exponent · eps."""
    info = torch.finfo(value.dtype)
    size = value.abs().double().clamp(min=info.smallest_normal)
    # frexp, not log2: exact at powers of two
    _, exponent = torch.frexp(size)
    return torch.ldexp(torch.full_like(size, info.eps), exponent - 1)
