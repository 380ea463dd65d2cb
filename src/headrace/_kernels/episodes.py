"""Episode bookkeeping of one step in one pass on the CPU: what would be twenty small torch operations.

The references in plain torch, which other devices run, stand in ``headrace.envs._episode_state``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

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
def begin_rows(ids: I64, chosen: I64, stride: int, episode_ids: I64, next_ids: I64, steps: I64, returns: F64) -> None:
    """Start an episode in each of ``ids`` (m,): ``chosen`` (m,), or those of ``next_ids`` where it is empty."""
    for row in range(ids.shape[0]):
        env = ids[row]
        episode_ids[env] = chosen[row] if chosen.shape[0] > 0 else next_ids[env]
        next_ids[env] = episode_ids[env] + stride
        steps[env] = 0
        returns[env] = 0.0


@kernel()
def any_nonzero(counts: NDArray[np.int32]) -> bool:
    """Whether some of ``counts`` (n, k) is not zero."""
    for row in range(counts.shape[0]):
        for column in range(counts.shape[1]):
            if counts[row, column] != 0:
                return True
    return False


@kernel()
def settle_rows(
    ids: I64,
    obs: F64,
    reward: F64,
    terminated: Flags,
    failed: Flags,
    bad: NDArray[np.int32],
    limit: int,
    steps: I64,
    returns: F64,
    held: F32,
    shown: F32,
    out_reward: F32,
    flags: Flags,
    ended: I64,
) -> int:
    """A step's bookkeeping in one pass: ``post_rows`` and ``finish_rows`` of one group, and a copy of what is held.

    Inputs: ``ids`` (n,), ``obs`` (n, F), ``reward`` (n,), ``terminated`` (n,), ``failed`` (n,) or (0,) for none,
    ``bad`` (N, k), not zero where a simulation failed, ``limit`` steps. Outputs: ``steps`` (N,) and ``returns`` (N,)
    are added to; rows of ``held`` (N, F); ``shown``
    (N, F), a copy of all of it; ``out_reward`` (N,) and ``flags`` (3, N) (terminated, truncated, diverged), zero for
    other environments; the first m of ``ended`` (n,), rows whose episode ended. Returns m.
    """
    count = 0
    any_failed = failed.shape[0] > 0
    if ids.shape[0] < held.shape[0]:
        for env in range(held.shape[0]):
            out_reward[env] = 0.0
            for kind in range(3):
                flags[kind, env] = False
    for row in range(ids.shape[0]):
        env = ids[row]
        steps[env] += 1
        # written so that NaN is not fine either
        fine = abs(reward[row]) <= FLOAT32_MAX and not (any_failed and failed[row])
        for column in range(bad.shape[1]):
            fine &= bad[env, column] == 0
        for column in range(obs.shape[1]):
            fine &= abs(obs[row, column]) <= FLOAT32_MAX
        if fine:
            for column in range(obs.shape[1]):
                held[env, column] = obs[row, column]
        gain = reward[row] if fine else 0.0
        over = terminated[row] and fine
        cut = not fine or steps[env] >= limit
        returns[env] += gain
        out_reward[env] = gain
        flags[0, env] = over
        flags[1, env] = cut
        flags[2, env] = not fine
        if over or cut:
            ended[count] = row
            count += 1
    for env in range(held.shape[0]):
        for column in range(held.shape[1]):
            shown[env, column] = held[env, column]
    return count


@kernel()
def end_rows(
    ended: I64,
    ids: I64,
    success: Flags,
    diverged: Flags,
    episode_ids: I64,
    returns: F64,
    steps: I64,
    whole: I64,
    sums: F64,
    small: Flags,
    all_sums: F64,
    all_lengths: I64,
    masks: Flags,
) -> int:
    """What is known of the episodes that end in rows ``ended`` (m,) of ``ids`` (n,), compact and scattered.

    Inputs: ``success`` (n,), ``diverged`` (N,). Outputs: ``whole`` (3, m): environments, episodes, lengths; ``sums``
    (m,); ``small`` (2, m): success, diverged; ``all_sums``, ``all_lengths`` (N,) and ``masks`` (2, N), zero for other
    environments. Returns how many diverged.
    """
    lost = 0
    for env in range(all_sums.shape[0]):
        all_sums[env] = 0.0
        all_lengths[env] = 0
        masks[0, env] = False
        masks[1, env] = False
    for i in range(ended.shape[0]):
        row = ended[i]
        env = ids[row]
        whole[0, i] = env
        whole[1, i] = episode_ids[env]
        whole[2, i] = steps[env]
        sums[i] = returns[env]
        small[0, i] = success[row] and not diverged[env]
        small[1, i] = diverged[env]
        if diverged[env]:
            lost += 1
        all_sums[env] = returns[env]
        all_lengths[env] = steps[env]
        masks[0, env] = True
        masks[1, env] = True
    return lost


@kernel()
def clear_rows(ids: I64, memory: tuple[F64, ...]) -> None:
    """Zero the rows ``ids`` (m,) of every array of ``memory``, (N, k)."""
    for part in range(len(memory)):
        for row in range(ids.shape[0]):
            for column in range(memory[part].shape[1]):
                memory[part][ids[row], column] = 0.0


@kernel()
def restore_rows(ids: I64, default: F64, state: F64, warning: NDArray[np.int32]) -> None:
    """Put the simulations ``ids`` (m,) back to ``default`` (S,): rows of ``state`` (N, S) and ``warning`` (N, …, 2)."""
    for row in range(ids.shape[0]):
        env = ids[row]
        for column in range(default.shape[0]):
            state[env, column] = default[column]
        for kind in range(warning.shape[1]):
            for column in range(warning.shape[2]):
                warning[env, kind, column] = 0


@kernel()
def gather_rows(ids: NDArray[np.int32], source: F64, target: F64) -> None:
    """Copy rows ``ids`` (m,) of ``source`` (N, k) to ``target`` (m, k)."""
    for row in range(ids.shape[0]):
        for column in range(source.shape[1]):
            target[row, column] = source[ids[row], column]


@kernel()
def scatter_rows(ids: NDArray[Any], sources: tuple[F64, ...], targets: tuple[NDArray[Any], ...]) -> None:
    """Copy every array of ``sources``, (m, k), to the rows ``ids`` (m,) of its partner in ``targets``, (N, k)."""
    for part in range(len(sources)):
        for row in range(ids.shape[0]):
            for column in range(sources[part].shape[1]):
                targets[part][ids[row], column] = sources[part][row, column]


@kernel()
def turn_rows(
    ended: I64,
    ids: I64,
    success: Flags,
    diverged: Flags,
    stride: int,
    episode_ids: I64,
    next_ids: I64,
    steps: I64,
    returns: F64,
    memory: tuple[F64, ...],
    default: F64,
    state: F64,
    warning: NDArray[np.int32],
    whole: I64,
    sums: F64,
    small: Flags,
    all_sums: F64,
    all_lengths: I64,
    masks: Flags,
) -> int:
    """From one episode to the next in one pass: ``end_rows``, ``begin_rows``, ``clear_rows`` and ``restore_rows``."""
    lost = end_rows(
        ended, ids, success, diverged, episode_ids, returns, steps, whole, sums, small, all_sums, all_lengths, masks
    )
    begin_rows(whole[0], ids[:0], stride, episode_ids, next_ids, steps, returns)
    clear_rows(whole[0], memory)
    restore_rows(whole[0], default, state, warning)
    return lost


@kernel()
def hold_rows(ids: I64, obs: F64, held: F32, shown: F32) -> None:
    """Write rows ``ids`` (m,) of ``held`` (N, F) from ``obs`` (m, F), and copy all of it to ``shown`` (N, F)."""
    for row in range(ids.shape[0]):
        for column in range(obs.shape[1]):
            held[ids[row], column] = obs[row, column]
    for env in range(held.shape[0]):
        for column in range(held.shape[1]):
            shown[env, column] = held[env, column]
