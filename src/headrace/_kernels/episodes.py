"""Episode bookkeeping of one step in one pass on the CPU: what would be twenty small torch operations.

The references in plain torch, which other devices run, stand in ``headrace.envs._episode_state``.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import kernel

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I64: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32] | NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]


FLOAT32_MAX = float(np.finfo(np.float32).max)


@kernel()
def take_rows(actions: Floats, ids: I64, out: F64) -> bool:
    """Copy rows ``ids`` (n,) of ``actions`` (N, A) to ``out`` (n, A) as float64; whether all of them are finite."""
    fine = True
    for row in range(ids.shape[0]):
        env = ids[row]
        for column in range(actions.shape[1]):
            value = np.float64(actions[env, column])
            fine = fine and np.isfinite(value)
            out[row, column] = value
    return fine


@kernel()
def post_rows(
    ids: I64, groups: tuple[F64, ...], held: tuple[F32, ...], reward: F64, failed: Flags, diverged: Flags
) -> int:
    """Write the rows whose numbers float32 can hold, and name the others.

    Inputs: ``ids`` (n,), ``groups`` of (n, F), ``reward`` (n,), ``failed`` (n,) or (0,) for none. Outputs: rows of
    ``held``, (N, F) per group, and ``diverged`` (n,). Returns the number of diverged rows, which are not written.
    """
    count = 0
    any_failed = failed.shape[0] > 0
    for row in range(ids.shape[0]):
        # written so that NaN is not fine either
        fine = abs(reward[row]) <= FLOAT32_MAX and not (any_failed and failed[row])
        for group in range(len(groups)):
            for column in range(groups[group].shape[1]):
                fine &= abs(groups[group][row, column]) <= FLOAT32_MAX
        diverged[row] = not fine
        if fine:
            for group in range(len(groups)):
                for column in range(groups[group].shape[1]):
                    held[group][ids[row], column] = groups[group][row, column]
        else:
            count += 1
    return count


@kernel()
def show_rows(ids: I64, groups: tuple[F64, ...], held: tuple[F32, ...]) -> None:
    """Write rows ``ids`` (n,) of ``held``, (N, F) per group, from ``groups`` of (n, F)."""
    for group in range(len(groups)):
        for row in range(ids.shape[0]):
            for column in range(groups[group].shape[1]):
                held[group][ids[row], column] = groups[group][row, column]


@kernel()
def finish_rows(
    ids: I64,
    reward: F64,
    terminated: Flags,
    truncated: Flags,
    diverged: Flags,
    limit: int,
    steps: I64,
    returns: F64,
    out_reward: F32,
    out_terminated: Flags,
    out_truncated: Flags,
    ended: I64,
) -> int:
    """Add rewards to returns, decide who ended, and scatter rows to environments.

    Inputs: ``ids`` (n,), ``reward`` (n,), ``terminated`` (n,), ``truncated`` and ``diverged`` (n,) or (0,) for none,
    ``limit`` steps, ``steps`` (N,). Outputs: ``returns`` (N,) is added to; ``out_*`` (N,) are zero where no row is
    written; the first m of ``ended`` (n,) are the rows (not environments) that ended. Returns m.
    """
    count = 0
    any_truncated, any_diverged = truncated.shape[0] > 0, diverged.shape[0] > 0
    for row in range(ids.shape[0]):
        env = ids[row]
        gone = any_diverged and diverged[row]
        gain = 0.0 if gone else reward[row]
        over = terminated[row] and not gone
        cut = gone or steps[env] >= limit or (any_truncated and truncated[row])
        returns[env] += gain
        out_reward[env] = gain
        out_terminated[env] = over
        out_truncated[env] = cut
        if over or cut:
            ended[count] = row
            count += 1
    return count


@kernel()
def collect_ends(
    ids: I64,
    episode_ids: I64,
    returns: F64,
    steps: I64,
    out_episode_ids: I64,
    out_returns: F64,
    out_lengths: I64,
    all_returns: F64,
    all_lengths: I64,
    mask: Flags,
) -> None:
    """Gather what is known of the episodes that ended in ``ids`` (m,): compact (m,) and scattered (N,).

    The scattered outputs are zero where no row is written.
    """
    for row in range(ids.shape[0]):
        env = ids[row]
        out_episode_ids[row] = episode_ids[env]
        out_returns[row] = returns[env]
        out_lengths[row] = steps[env]
        all_returns[env] = returns[env]
        all_lengths[env] = steps[env]
        mask[env] = True


@kernel()
def begin_rows(ids: I64, chosen: I64, stride: int, episode_ids: I64, next_ids: I64, steps: I64, returns: F64) -> None:
    """Start an episode in each of ``ids`` (m,): ``chosen`` (m,), or those of ``next_ids`` where it is empty."""
    for row in range(ids.shape[0]):
        env = ids[row]
        episode_ids[env] = chosen[row] if chosen.shape[0] > 0 else next_ids[env]
        next_ids[env] = episode_ids[env] + stride
        steps[env] = 0
        returns[env] = 0.0
