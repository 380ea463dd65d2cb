"""Rows of several fields into pages of memory, a whole step of all environments in one call.

A *lane* is some fields side by side in a row; every environment has a page of each lane that its newest rows are in,
known by its address. The caller keeps pages and sources alive and the numbers in range: kernels do not check.
"""

from __future__ import annotations

from headrace._kernels.compiled import kernel, run
from headrace._kernels.gather import Int64s, memcpy


@kernel()
def find_starts(slots: Int64s, steps: Int64s, lanes: Int64s, heads: Int64s, out: Int64s) -> int:
    """Which lanes and environments need a new page for step ``steps[k]`` of environment ``slots[k]``.

    Args:
        slots: (n,).
        steps: (n,) number of the step in its episode, from 0; -1 for the beginning.
        lanes: (L, 3): rows of a page, bytes of a row, whether there is a row for the beginning.
        heads: (L, N) address of the newest page, 0 without one.
        out: (L · n, 2) receives lane and environment.

    Returns:
        How many; -1 if a row in the middle of a page has none.
    """
    count = 0
    for lane in range(lanes.shape[0]):
        for k in range(slots.shape[0]):
            if (steps[k] + lanes[lane, 2]) % lanes[lane, 0] == 0:
                out[count, 0], out[count, 1] = lane, slots[k]
                count += 1
            elif heads[lane, slots[k]] == 0:
                return -1
    return count


@kernel()
def _put_rows(
    start: int,
    stop: int,
    slots: Int64s,
    rows: Int64s,
    steps: Int64s,
    sources: Int64s,
    fields: Int64s,
    lanes: Int64s,
    heads: Int64s,
) -> None:
    for field in range(fields.shape[0]):
        of_record, width, lane, offset = fields[field, 0], fields[field, 1], fields[field, 2], fields[field, 3]
        page_rows, row_bytes, first = lanes[lane, 0], lanes[lane, 1], lanes[lane, 2]
        for k in range(start, stop):
            row = rows[k] if of_record else slots[k]
            place = heads[lane, slots[k]] + ((steps[k] + first) % page_rows) * row_bytes + offset
            memcpy(place, sources[field] + row * width, width)


def put_rows(
    slots: Int64s,
    rows: Int64s,
    steps: Int64s,
    sources: Int64s,
    fields: Int64s,
    lanes: Int64s,
    heads: Int64s,
    share: int,
) -> None:
    """Copy every field of environment ``slots[k]`` to the row of step ``steps[k]`` of its episode.

    Args:
        slots: (n,) distinct.
        rows: (n,) where a source has a row per environment of the record instead of one per environment.
        steps: (n,), -1 for the beginning of an episode.
        sources: (F,) addresses of contiguous rows.
        fields: (F, 4): whether rows are those of the record, bytes of a row, lane, offset in the lane's row.
        lanes: (L, 3): rows of a page, bytes of a row, whether there is a row for the beginning.
        heads: (L, N) address of the newest page.
        share: environments that are worth a thread of their own.
    """
    if len(slots) < 2 * share:
        _put_rows(0, len(slots), slots, rows, steps, sources, fields, lanes, heads)
    else:
        run(_put_rows, len(slots), slots, rows, steps, sources, fields, lanes, heads, min_rows=share)
