"""Index arithmetic over rings of frames: where the frames of an observation, and of the one after it, are.

Each environment e has a ring of S slots; its p-th transition (p counts from 0 for ever) is in slot ``p % S``, row
``e · S + p % S``. The ring holds, in order of age: K−1 frames kept only as history, L transitions, the frame after the
newest one, and one slot that a write in progress may touch, so S = L + K + 1. The row space goes on after the rings
with side rows: true last frames, and the history of trajectories that were joined in the middle.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import helper, inline, kernel
from headrace.replay._blocks import Int64s
from headrace.replay.row_space import Bools, memcmp, memcpy

Flags: TypeAlias = NDArray[np.uint8]
Int32s: TypeAlias = NDArray[np.int32]
Float32s: TypeAlias = NDArray[np.float32]
Float64s: TypeAlias = NDArray[np.float64]
Ring: TypeAlias = tuple[Flags, Int32s, Int32s, Int32s, Int32s]
"""Of every transition, (N, S) each: flags, its step, its trajectory, side rows of the last frame and of the history."""
Stack: TypeAlias = tuple[int, bool, int, int]
"""K, whether episodes begin with zeros, rows of a block of history, the first side row."""

TERMINATED = 1
TRUNCATED = 2
CUT = 4
"""The caller broke the trajectory off after this transition: reset, or went on from another observation."""
ENDED = TERMINATED | TRUNCATED | CUT
NO_ROW = -1
_FIXED = 4
"""Columns of the table before the addresses of shards."""


@kernel()
def begin(
    ids: Int64s, joined: Bools, follows: Bools, ended: Bools, counts: Int64s, floors: Int64s, flags: Flags,
    rows: Int64s, marks: Bools,
) -> int:  # fmt: skip
    """Place n transitions, in order of time, any number of each environment, and return how many trajectories begin.

    Nothing before position ``floors[e]`` is stored any more.

    ```
    rows      = row of a transition; row of the frame after it                                           (2, n)
    marks     = starts, doubtful, put, cut, cut_after, last                                              (6, n)
    starts    : a trajectory begins here for certain
    doubtful  : first of its environment in this write, after one that did not end: to be compared
    put       : its frame is not in the ring yet
    cut       : the one before it in this write is cut off, as it is not ``joined``
    cut_after : the same, seen from the one before
    last      : last of its environment in this write
    ```
    """
    slots = flags.shape[1]
    at = counts.copy()
    before = np.full(counts.shape[0], NO_ROW, np.int64)
    some = 0
    for i in range(ids.shape[0]):
        e = ids[i]
        count, previous = at[e], before[e]
        rows[0, i] = e * slots + count % slots
        rows[1, i] = e * slots + (count + 1) % slots
        doubtful = broken = False
        if previous >= 0:
            broken = not ended[previous] and not joined[i]
            starts = ended[previous] or broken
            marks[4, previous] = broken
            marks[5, previous] = False
        else:
            starts = count == floors[e] or (flags[e, (count - 1) % slots] & ENDED) != 0
            doubtful = not starts and not follows[i]
        marks[0, i], marks[1, i], marks[2, i] = starts, doubtful, not doubtful
        marks[3, i], marks[4, i], marks[5, i] = broken, False, True
        some += int(starts)
        at[e] = count + 1
        before[e] = i
    return some


@kernel()
def advance(
    ids: Int64s, starts: Bools, terminated: Bools, truncated: Bools, cut_after: Bools, sides: tuple[Int64s, Int64s],
    length: int, history: int, heads: Int64s, ring: Ring, out: Int64s,
) -> bool:  # fmt: skip
    """Write the bookkeeping of transitions, in order of time, and move the write heads (counts and trajectories).

    ``sides`` are rows for last frames and histories by i, or NO_ROW. ``out`` (3, n) receives the transitions' numbers
    and the side rows of what leaves the ring, or NO_ROW; the result is whether there are any. Side rows of positions
    below the floors were freed before.
    """
    finals, prefixes = sides
    counts, trajectories, floors = heads[0], heads[1], heads[2]
    flags, steps, trajectory, final, prefix = ring
    slots = flags.shape[1]
    some = False
    for i in range(ids.shape[0]):
        e = ids[i]
        count = counts[e]
        slot = count % slots
        if starts[i]:
            trajectories[e] += 1
            steps[e, slot] = 0
        else:
            steps[e, slot] = steps[e, (count - 1) % slots] + 1
        trajectory[e, slot] = trajectories[e] - 1
        flag = (TERMINATED if terminated[i] else 0) | (TRUNCATED if truncated[i] else 0)
        flags[e, slot] = flag | (CUT if cut_after[i] else 0)
        final[e, slot] = finals[i]
        prefix[e, slot] = prefixes[i]
        out[0, i], out[1, i], out[2, i] = count, NO_ROW, NO_ROW
        if count - length >= floors[e] and (flags[e, (count - length) % slots] & ENDED) != 0:
            out[1, i] = final[e, (count - length) % slots]
        if count + 1 - slots >= max(floors[e] - history, 0):
            out[2, i] = prefix[e, (count + 1) % slots]
        some = some or out[1, i] >= 0 or out[2, i] >= 0
        counts[e] = count + 1
    return some


@inline
def frame_row(e: int, p: int, start: int, stop: int, ring: Ring, stack: Stack) -> int:
    """Return the row of frame p of a trajectory from ``start`` on; ``stop`` is the frame after a transition."""
    flags, _, _, final, prefix = ring
    _, zero, history, side = stack
    slots = flags.shape[1]
    if p < start:
        block = prefix[e, start % slots]
        if block >= 0:
            return side + block + history + (p - start)
        return NO_ROW if zero else e * slots + start % slots
    if p == stop and (flags[e, (p - 1) % slots] & ENDED) != 0:
        return side + final[e, (p - 1) % slots]
    return e * slots + p % slots


@kernel()
def pending(ids: Int64s, fresh: Bools, counts: Int64s, ring: Ring, stack: Stack, out: Int64s) -> None:
    """Write the rows (n, K) of the observation that follows the newest transition, where its trajectory goes on."""
    steps, frames = ring[1], stack[0]
    slots = steps.shape[1]
    for i in range(ids.shape[0]):
        if not fresh[i]:
            e = ids[i]
            count = int(counts[e])
            start = count - 1 - int(steps[e, (count - 1) % slots])
            for f in range(frames):
                out[i, f] = frame_row(e, count - frames + 1 + f, start, NO_ROW, ring, stack)


@kernel()
def windows(envs: Int64s, positions: Int64s, ring: Ring, stack: Stack, out: Int64s) -> None:
    """Write the rows of the frames of T transitions in a row, T + K of them, into ``out`` (B, T + K).

    Observation t is out[:, t : t + K], the one after it out[:, t + 1 : t + 1 + K]. The T transitions are of one
    trajectory.
    """
    flags, steps, final, frames = ring[0], ring[1], ring[3], stack[0]
    slots = steps.shape[1]
    for b in range(envs.shape[0]):
        e, position = envs[b], positions[b]
        first, count = position - frames + 1, out.shape[1]
        step = steps[e, position % slots]
        if step >= frames - 1:
            # nearly always: all of it is in the ring; one division serves the whole row
            slot = last = first % slots
            for f in range(count):
                out[b, f] = e * slots + slot
                last = slot if f < count - 1 else last
                slot = slot + 1 if slot + 1 < slots else 0
            if flags[e, last] & ENDED:
                out[b, count - 1] = stack[3] + final[e, last]
        else:
            for f in range(count):
                out[b, f] = frame_row(e, first + f, position - step, first + count - 1, ring, stack)


@kernel()
def observation_pairs(envs: Int64s, positions: Int64s, ahead: Int64s, ring: Ring, stack: Stack, out: Int64s) -> None:
    """Write the rows of an observation and of the one ``ahead[b]`` steps later into ``out`` (B, 2K)."""
    steps, frames = ring[1], stack[0]
    for b in range(envs.shape[0]):
        e, position = envs[b], positions[b]
        start = position - steps[e, position % steps.shape[1]]
        stop = position + ahead[b]
        for f in range(frames):
            p = position - frames + 1 + f
            out[b, f] = frame_row(e, p, start, NO_ROW, ring, stack)
            out[b, frames + f] = frame_row(e, p + ahead[b], start, stop, ring, stack)


@kernel()
def describe(
    envs: Int64s, positions: Int64s, run: int, n_step: int, gammas: Float64s, counts: Int64s, rewards: Float32s,
    ring: Ring, rows: Int64s, ids: Int64s, places: Int64s, reals: Float32s, done: Bools,
) -> None:  # fmt: skip
    """Identity and n-step outcome of ``run`` transitions in a row from each position on; B counts all of them.

    ``gammas`` (N,) are the discounts γ of the environments.

    ```
    rows     = row                                                                                       (B,)
    ids      = index p · N + e; trajectory id k · N + e                                                  (2, B)
    places   = step in the trajectory; m                                                                 (2, B)
    reals    = Σ_{k<m} γᵏ r_{p+k}, summed forwards in float64; γᵐ                                        (2, B)
    done     = done, terminated, truncated, cut of transition p + m − 1                                  (4, B)
    m        = steps until the trajectory ends, is cut, or reaches the write head; at most n
    ```
    "cut" is set at the write head too, where nothing says how the trajectory goes on.
    """
    flags, steps, trajectory, _, _ = ring
    num_envs, slots = flags.shape
    for b in range(envs.shape[0] * run):
        e, p = envs[b // run], positions[b // run] + b % run
        slot = p % slots
        rows[b] = e * slots + slot
        ids[0, b] = p * num_envs + e
        ids[1, b] = np.int64(trajectory[e, slot]) * num_envs + e
        places[0, b] = steps[e, slot]
        total, weight, m = 0.0, 1.0, 0
        while True:
            slot = p % slots
            total += weight * rewards[e, slot]
            weight *= gammas[e]
            m += 1
            flag = flags[e, slot]
            if m == n_step or flag & ENDED or p + 1 == counts[e]:
                break
            p += 1
        places[1, b] = m
        reals[0, b] = total
        reals[1, b] = weight
        done[0, b] = (flag & (TERMINATED | TRUNCATED)) != 0
        done[1, b] = (flag & TERMINATED) != 0
        done[2, b] = (flag & TRUNCATED) != 0
        done[3, b] = (flag & CUT) != 0 or (flag == 0 and p + 1 == counts[e])


@kernel()
def _spread(ticket: Float64s, ends: Int64s, out: Int64s) -> None:
    total = ends[-1]
    for b in range(ticket.shape[0]):
        # the product may round up to the total
        item = min(np.int64(ticket[b] * total), total - 1)
        e = np.searchsorted(ends, item, side="right")
        out[0, b] = e
        out[1, b] = item - (ends[e - 1] if e > 0 else 0)


def spread(tickets: Float64s, ends: Int64s) -> Int64s:
    """Turn uniform numbers in [0, 1) into environment and offset, (2, B): each of ``ends[-1]`` items equally likely.

    ``ends`` is the running sum of items per environment.
    """
    out = np.empty((2, tickets.shape[0]), np.int64)
    _spread(tickets, ends, out)
    return out


@kernel()
def last_of_trajectory(envs: Int64s, positions: Int64s, counts: Int64s, flags: Flags, out: Int64s) -> None:
    """Write the position of the last transition of each transition's trajectory, the newest where it still goes on."""
    slots = flags.shape[1]
    for b in range(envs.shape[0]):
        e, p = envs[b], positions[b]
        while p + 1 < counts[e] and flags[e, p % slots] & ENDED == 0:
            p += 1
        out[b] = p


@inline
def _address(table: Int64s, j: int, row: int) -> int:
    return table[j, _FIXED + (row >> table[j, 0])] + (row & ((1 << table[j, 0]) - 1)) * table[j, 1]


@helper
def _follows(e: int, count: int, starts: bool, sizes: Int64s, ring: Ring, table: Int64s, pointers: Int64s) -> bool:
    """Return whether the observation of environment e is, bit for bit, what is stored, or begins an episode."""
    slots = ring[1].shape[1]
    start = count - 1 - ring[1][e, (count - 1) % slots]
    for j in range(table.shape[0]):
        size, frames, zero = table[j, 1], table[j, 2], table[j, 3] != 0
        here, stack = pointers[0, j] + e * frames * size, (frames, zero, sizes[1], sizes[2])
        for f in range(frames - starts):
            there = sizes[3]
            if not starts:
                p = count - frames + 1 + f
                row = e * slots + p % slots if p >= start else frame_row(e, p, start, NO_ROW, ring, stack)
                there = _address(table, j, row) if row >= 0 else there
            elif not zero:
                there = here + (frames - 1) * size
            if memcmp(there, here + f * size, size) != 0:
                return False
    return True


@kernel()
def write_step(
    ids: Int64s, terminated: Bools, truncated: Bools, reward: Float32s, at: int, frame: int,
    sizes: Int64s, heads: Int64s, ring: Ring, rewards: Float32s, table: Int64s, pointers: Int64s,
    marks: Bools, out: Int64s,
) -> int:  # fmt: skip
    """Write a transition of each environment and return 1, or 2 if side rows are freed; or 0, and nothing is written.

    Frame ``frame`` of stack ``at`` is compared with the next observation.

    ```
    sizes     transitions of a ring; frames of history; the first side row; address of a frame of zeros
    table     of each leaf, then of each column: shift; bytes per row; frames, 0 for a column; zero-filled; shards
    pointers  observations, or columns; next observations; last observations where a trajectory ends   (3, J)
    marks     whether a trajectory starts; zeros                                                       (2, n)
    out       positions; freed side rows; freed blocks; rows; rows of last frames; NO_ROW              (6, n)
    ```
    """
    counts, floors, flags = heads[0], heads[2], ring[0]
    slots = flags.shape[1]
    starts, finals = marks[0], out[4]
    for i in range(ids.shape[0]):
        e = ids[i]
        count = int(counts[e])
        starts[i] = count == floors[e] or (flags[e, (count - 1) % slots] & ENDED) != 0
        if not _follows(e, count, starts[i], sizes, ring, table, pointers):
            return 0
    for j in range(table.shape[0]):
        size, frames = table[j, 1], table[j, 2]
        if frames > 1:
            place = (ids[at] * frames + frame % (frames - 1)) * size
            later = pointers[2 if terminated[at] or truncated[at] else 1, j]
            if memcmp(later + place, pointers[0, j] + place + size, size) != 0:
                return 0
    for i in range(ids.shape[0]):
        e = ids[i]
        row, following = e * slots + counts[e] % slots, e * slots + (counts[e] + 1) % slots
        for j in range(table.shape[0]):
            size, frames = table[j, 1], table[j, 2]
            newest = (e * frames + frames - 1) * size
            if frames == 0:
                memcpy(_address(table, j, row), pointers[0, j] + e * size, size)
                continue
            if starts[i]:
                memcpy(_address(table, j, row), pointers[0, j] + newest, size)
            if finals[i] >= 0:
                memcpy(_address(table, j, sizes[2] + finals[i]), pointers[2, j] + newest, size)
            memcpy(_address(table, j, following), pointers[1, j] + newest, size)
        rewards[row] = reward[i]
        out[3, i] = row
    sides = finals, out[5]
    freed = advance(ids, starts, terminated, truncated, marks[1], sides, sizes[0], sizes[1], heads, ring, out)
    return 2 if freed else 1
