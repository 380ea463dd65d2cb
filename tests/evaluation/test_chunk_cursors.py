"""Cursors on their own: an answer belongs to one episode and one place in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.errors import LifecycleError
from headrace.evaluation.scheduling import ChunkLengths, Cursors
from headrace.types import Chunk

CPU = torch.device("cpu")


def _cursors() -> Cursors:
    return Cursors(4, 1, ChunkLengths(horizon=3, execute=2), CPU)


def _chunk(envs: list[int], episodes: list[int], index: list[int]) -> Chunk:
    rows = torch.arange(3.0)[None, :, None] + 10 * torch.tensor(episodes)[:, None, None]
    return Chunk(
        env_ids=torch.tensor(envs), episode_ids=torch.tensor(episodes), index=torch.tensor(index), actions=rows
    )


def test_an_answer_for_an_ended_episode_is_thrown_away_though_its_slot_waits_again() -> None:
    cursors, slot = _cursors(), np.array([2])
    cursors.begin(slot, np.array([5]))
    cursors.ask(slot)
    cursors.begin(slot, np.array([6]))
    cursors.ask(slot)
    assert cursors.load(_chunk([2], [5], [0])).tolist() == [False]
    assert not cursors.has_action.any()
    assert cursors.load(_chunk([2], [6], [0])).tolist() == [True]
    assert cursors.play(slot).tolist() == [[60.0]]


def test_an_answer_that_nobody_asked_for_or_that_comes_twice_is_thrown_away() -> None:
    cursors, slots = _cursors(), np.array([0, 1])
    cursors.begin(slots, np.array([7, 8]))
    cursors.ask(slots[:1])
    assert cursors.load(_chunk([0, 1], [7, 8], [0, 0])).tolist() == [True, False]
    assert cursors.load(_chunk([0], [7], [0])).tolist() == [False]
    assert cursors.has_action.tolist() == [True, False, False, False]
    assert cursors.due.tolist() == [False, True, False, False]


def test_an_environment_plays_its_rows_and_runs_dry() -> None:
    cursors, slot = _cursors(), np.array([1])
    cursors.begin(slot, np.array([4]))
    cursors.ask(slot)
    cursors.load(_chunk([1], [4], [0]))
    assert [cursors.play(slot).item() for _ in range(2)] == [40.0, 41.0]
    assert cursors.due[1]
    rest, length = cursors.left_over(slot)
    assert (rest[0, :, 0].tolist(), length.tolist()) == ([42.0, 0.0, 0.0], [1])
    with pytest.raises(LifecycleError, match=r"environments \[1\] have no action to play"):
        cursors.play(slot)
    cursors.begin(slot, -1)
    assert not cursors.due.any()
    assert not cursors.running.any()
