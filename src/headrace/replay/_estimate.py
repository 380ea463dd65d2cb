"""What a buffer will take, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import CapacityError
from headrace.replay._checks import check_sizes
from headrace.replay._pool import slots_per_env
from headrace.replay._spec import SpaceLike, StoreSpec, store_spec
from headrace.types import StackSpec

BOOKKEEPING_BYTES = 1 + 4 * 4 + 4
"""Per slot: flags, four int32 fields, the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEstimate:
    """Bytes of a full buffer; indices of samplers other than uniform (4 to 10 bytes per transition) are not counted."""

    nbytes: int
    frame_bytes: int
    """The rings: every frame once."""
    side_bytes: int
    """True last frames of the episodes stored."""
    other_bytes: int
    """Actions, rewards, flags and trajectory bookkeeping."""
    bytes_per_transition: float
    stored_twice_nbytes: int
    """What the same transitions take in a buffer that stores ``obs`` and ``next_obs`` with their stacks."""


def estimate(
    capacity: int,
    num_envs: int,
    observation: SpaceLike,
    action: SpaceLike,
    *,
    stack: Mapping[str, StackSpec] | StackSpec | None = None,
    episode_length: float = 100.0,
) -> StoreEstimate:
    """What ``ReplayBuffer(capacity, num_envs, observation, action, stack=stack)`` takes when it is full.

    Args:
        capacity: transitions, over all environments.
        num_envs: environments.
        observation: one environment's observation space, stacked as the environment gives it.
        action: one environment's action space.
        stack: how stacked observations are made of frames.
        episode_length: mean transitions per episode: each end costs one more frame.
    """
    check_sizes(capacity, num_envs)
    return estimate_store(store_spec(capacity, num_envs, observation, action, stack), episode_length)


def estimate_store(spec: StoreSpec, episode_length: float = 100.0) -> StoreEstimate:
    """:func:`estimate` for spaces that were read already."""
    capacity, num_envs, leaves, action = spec.capacity, spec.num_envs, spec.leaves, spec.action
    slots = num_envs * slots_per_env(spec.length, max(leaf.frames for leaf in leaves))
    frame = sum(leaf.frame.nbytes for leaf in leaves)
    frame_bytes = slots * frame
    side_bytes = round(capacity / episode_length) * frame
    # beside what every slot takes: the heads of the environments, and the count of draws
    other = slots * (action.nbytes + BOOKKEEPING_BYTES) + 16 * num_envs + 8
    total = frame_bytes + side_bytes + other
    observed = sum(leaf.observed.nbytes for leaf in leaves)
    return StoreEstimate(
        nbytes=total,
        frame_bytes=frame_bytes,
        side_bytes=side_bytes,
        other_bytes=other,
        bytes_per_transition=total / capacity,
        stored_twice_nbytes=capacity * (2 * observed + action.nbytes + 4 + 2),
    )


def refuse_unless_fits(needed: StoreEstimate, available: int, where: str) -> None:
    """Raise :class:`CapacityError` where a full buffer would not fit."""
    if needed.nbytes > available:
        raise CapacityError(
            f"replay: a full buffer takes {_gib(needed.nbytes)} ({needed.bytes_per_transition:,.0f} bytes per "
            f"transition), but {where} has {_gib(available)} free; lower capacity, "
            "keep it on disk with directory=…, or use codec=…"
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f} GiB"
