"""Refuse stacks that the store could not give back: each must be the stack before it and one more frame.

A store keeps only the newest frame of a stack and takes the older ones from earlier observations. With another axis or
order of frames than :class:`~headrace.types.StackSpec` names, it would give back other pixels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ShapeError
from headrace.replay._blocks import Int64s
from headrace.replay._pool import Sourced, Write
from headrace.replay._spec import LeafSpec, StoreSpec
from headrace.replay.row_space import shifts_differ
from headrace.types import StackSpec

_THOROUGH = 100
"""Transitions per environment in which all older frames are compared; afterwards one frame per write is."""

_FIRST = np.zeros(1, np.int64)


class StackCheck:
    """Compares stacks with the stacks before them, thoroughly at first."""

    def __init__(self, spec: StoreSpec) -> None:
        self._leaves = [leaf for leaf in spec.leaves if leaf.frames > 1]
        self._seen = np.zeros(spec.num_envs, np.int64)
        self.young = True
        """Whether an environment has so few transitions that all of its frames are compared."""
        self._writes = 0

    def check_step(self, write: Write) -> None:
        """Raise unless the next observations of a step are its observations and one more frame."""
        count = write.ids.shape[0]
        if not self._leaves or not count:
            return
        if self.young:
            ended = write.terminated | write.truncated
            for which, after in ((~ended).nonzero()[0], write.next_of), (ended.nonzero()[0], write.final_of):
                self.check(write.ids[which], (write.obs, write.source[which]), after(which))
            return
        at, frame = self.next_place(count)
        which = np.array([at])
        after = write.final_of if write.terminated[at] or write.truncated[at] else write.next_of
        later, rows = after(which)
        self._compare(write.ids[which], (write.obs, write.source[which]), (later, rows), _FIRST, frame)

    def check(self, ids: Int64s, earlier: Sourced, later: Sourced) -> None:
        """Raise unless stack i of ``later`` is stack i of ``earlier`` moved by one frame; ``ids`` (n,) are their envs.

        Raises:
            ShapeError: naming the leaf, the axis and order that were expected, and those that fit.
        """
        if not self._leaves or not ids.shape[0]:
            return
        which = np.empty(0, np.int64)
        if self.young:
            which = (self._seen[ids] < _THOROUGH).nonzero()[0]
            np.add.at(self._seen, ids, 1)
            self.young = bool((self._seen < _THOROUGH).any())
        if which.shape[0]:
            self._compare(ids, earlier, later, which, None)
        else:
            at, frame = self.next_place(ids.shape[0])
            self._compare(ids, earlier, later, np.array([at]), frame)

    def next_place(self, count: int) -> tuple[int, int]:
        """Return which of ``count`` rows, and which of their frames, is to be compared in this write."""
        self._writes += 1
        return self._writes % count, self._writes // count

    def _compare(self, ids: Int64s, earlier: Sourced, later: Sourced, which: Int64s, frame: int | None) -> None:
        first, second = earlier[1][which], later[1][which]
        for leaf in self._leaves:
            only = -1 if frame is None else frame % (leaf.frames - 1)
            differs = np.zeros(which.shape[0], np.bool_)
            one, other = earlier[0][leaf.name], later[0][leaf.name]
            shifts_differ(leaf.outer, leaf.frames, (one, first), (other, second), only, differs)
            if np.count_nonzero(differs):
                bad = int(differs.nonzero()[0][0])
                raise ShapeError(_describe(leaf, int(ids[which[bad]]), one[first[bad]], other[second[bad]]))


def _describe(leaf: LeafSpec, env: int, earlier: Tensor, later: Tensor) -> str:
    """Say which axis and order were expected of two stacks in turn, and which would fit."""
    stack = leaf.stack
    assert stack is not None
    shape, fits = leaf.observed.shape, list[str]()
    for dim in range(len(shape)):
        for layout in ("concat", "new_axis"):
            if shape[dim] % stack.frames or (layout == "new_axis" and shape[dim] != stack.frames):
                continue
            spec = StackSpec(frames=stack.frames, dim=dim, layout=layout)
            ours = torch.stack([spec.frame(earlier[None], k) for k in range(stack.frames)])
            theirs = torch.stack([spec.frame(later[None], k) for k in range(stack.frames)])
            if torch.equal(ours[1:], theirs[:-1]):
                fits.append(f"StackSpec(frames={stack.frames}, dim={dim}, layout={layout!r})")
            elif torch.equal(ours[:-1], theirs[1:]):
                fits.append(f"frames on axis {dim} from newest to oldest, which must be flipped first")
    return (
        f"stack of observation {leaf.name!r}, environment {env}: expected {stack.frames} frames on axis "
        f"{stack.axis(len(leaf.frame.shape))} of {shape}, oldest to newest, each stack the one before it moved by one "
        f"frame; got another. What fits these two: {'; '.join(fits) or 'no axis and order'}. "
        "Declare that, or store the observation without stack="
    )
