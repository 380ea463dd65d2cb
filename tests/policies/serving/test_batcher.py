"""The merging of requests: who shares a batch, who does not, and what one client's trouble means for the others."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest
import torch
from remote_rows import ACTION_DIM, HORIZON, make_request

from headrace.errors import DataError, LifecycleError, PolicyError
from headrace.policies import Batching
from headrace.policies.protocol import ChunkContext, EpisodeRows
from headrace.policies.serving._batcher import Batcher
from headrace.types import Obs

FOREVER = 3600.0


class Gate:
    """A policy whose calls wait until they are let through, and whose chunks are full of seed·100 + episode."""

    horizon, action_dim, obs_steps = HORIZON, ACTION_DIM, 1

    def __init__(self, *, closed: bool = False) -> None:
        self.batches: list[list[int]] = []
        self.entered = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.closed = closed
        self.poison: int | None = None

    def __call__(self, obs: Obs, context: ChunkContext) -> torch.Tensor:
        ids = context.episode_ids.tolist()
        self.batches.append(ids)
        self.entered.release()
        if self.closed:
            assert self.allowed.acquire(timeout=30.0)
        if self.poison in ids:
            raise ValueError(f"episode {self.poison} is poison")
        numbers = (100 * context.seeds + context.episode_ids).float()
        return numbers[:, None, None].expand(-1, HORIZON, ACTION_DIM)


def numbers(future: object) -> list[float]:
    return future.result(timeout=30.0).answer.actions[:, 0, 0].tolist()  # type: ignore[attr-defined]


def test_requests_that_come_while_the_model_runs_are_one_batch_and_each_client_gets_its_own_rows() -> None:
    policy = Gate(closed=True)
    batcher = Batcher(policy, Batching(mode="fast"), max_rows=16, max_wait=0.0)
    first = batcher.submit(0, make_request(1, first_episode=50))
    assert policy.entered.acquire(timeout=30.0)
    later = [batcher.submit(c, make_request(c, first_episode=10 * c, seed=c)) for c in (1, 2, 3)]
    policy.allowed.release(2)
    assert numbers(first) == [50.0]
    assert [numbers(future) for future in later] == [[110.0], [220.0, 221.0], [330.0, 331.0, 332.0]]
    assert policy.batches == [[50], [10, 20, 21, 30, 31, 32]]
    batcher.close()
    assert (batcher.stats.batches, batcher.stats.shared, batcher.stats.rows) == (2, 1, 7)


def test_an_idle_model_waits_for_the_clients_that_are_there_and_no_longer_once_all_have_asked() -> None:
    policy = Gate()
    batcher = Batcher(policy, Batching(mode="fast"), max_rows=16, max_wait=FOREVER)
    batcher.join(0)
    batcher.join(1)
    one = batcher.submit(0, make_request(1))
    assert not one.done()
    two = batcher.submit(1, make_request(1, first_episode=1))
    assert (numbers(one), numbers(two)) == ([0.0], [1.0])
    assert policy.batches == [[0, 1]]
    batcher.close()


def test_a_client_that_leaves_is_not_waited_for_and_takes_its_rows_with_it() -> None:
    policy = Gate()
    batcher = Batcher(policy, Batching(mode="fast"), max_rows=16, max_wait=FOREVER)
    for client in range(3):
        batcher.join(client)
    kept, lost = batcher.submit(0, make_request(1)), batcher.submit(1, make_request(4, first_episode=40))
    batcher.leave(1)
    batcher.leave(2)
    assert numbers(kept) == [0.0]
    with pytest.raises(CancelledError):
        lost.result(timeout=30.0)
    batcher.close()
    assert policy.batches == [[0]]
    assert batcher.stats.dropped == 1


def test_a_full_batch_goes_at_once_and_the_rest_is_the_next() -> None:
    policy = Gate()
    batcher = Batcher(policy, Batching(mode="fast"), max_rows=4, max_wait=FOREVER)
    for client in range(4):
        batcher.join(client)
    futures = [batcher.submit(client, make_request(2, first_episode=2 * client)) for client in range(2)]
    assert [numbers(future) for future in futures] == [[0.0, 1.0], [2.0, 3.0]]
    assert policy.batches == [[0, 1, 2, 3]]
    batcher.close()


def test_a_request_larger_than_a_batch_is_cut() -> None:
    policy = Gate()
    batcher = Batcher(policy, Batching(mode="fast"), max_rows=4, max_wait=0.0)
    future = batcher.submit(0, make_request(10))
    assert numbers(future) == list(range(10))
    assert [len(batch) for batch in policy.batches] == [4, 4, 2]
    assert future.result().answer.calls == 3
    batcher.close()


def test_a_row_stands_at_its_place_whoever_shares_the_strict_batch() -> None:
    policy = Gate(closed=True)
    batcher = Batcher(policy, Batching(mode="strict", size=4, places="modulo"), max_rows=16, max_wait=0.0)
    first = batcher.submit(0, make_request(1, first_episode=2))
    assert policy.entered.acquire(timeout=30.0)
    futures = [
        batcher.submit(1, make_request(1, first_episode=6, seed=1)),
        batcher.submit(2, make_request(1, first_episode=3)),
    ]
    policy.allowed.release(40)  # rows are answered again
    assert [numbers(future) for future in (first, *futures)] == [[2.0], [106.0], [3.0]]
    assert policy.batches[0] == [-1, -1, 2, -1]
    assert [-1, -1, 6, 3] in policy.batches
    batcher.close()


def test_rows_of_other_shapes_are_not_merged() -> None:
    policy = Gate(closed=True)
    batcher = Batcher(policy, Batching(mode="fast"), max_rows=16, max_wait=0.0)
    first = batcher.submit(0, make_request(1))
    assert policy.entered.acquire(timeout=30.0)
    small = batcher.submit(1, make_request(1, first_episode=1))
    large = batcher.submit(2, make_request(1, first_episode=2, obs={"policy": torch.zeros(1, 9)}))
    policy.allowed.release(3)
    assert [numbers(future) for future in (first, small, large)] == [[0.0], [1.0], [2.0]]
    assert policy.batches == [[0], [1], [2]]
    batcher.close()


def test_rows_that_the_policy_cannot_take_fail_their_own_client_only() -> None:
    policy = Gate(closed=True)
    policy.poison = 7
    batcher = Batcher(policy, Batching(mode="fast"), max_rows=16, max_wait=0.0)
    first = batcher.submit(0, make_request(1))
    assert policy.entered.acquire(timeout=30.0)
    good, bad = batcher.submit(1, make_request(2, first_episode=3)), batcher.submit(2, make_request(1, first_episode=7))
    policy.allowed.release(8)
    assert (numbers(first), numbers(good)) == ([0.0], [3.0, 4.0])
    with pytest.raises(ValueError, match="episode 7 is poison"):
        bad.result(timeout=30.0)
    assert numbers(batcher.submit(2, make_request(1, first_episode=9))) == [9.0], "the model's thread lives on"
    batcher.close()


def test_a_policy_that_exits_does_not_end_the_server() -> None:
    def leave(obs: Obs, context: ChunkContext) -> torch.Tensor:
        raise SystemExit(3)

    policy = Gate()
    policy.__class__ = type("Leaving", (Gate,), {"__call__": lambda self, obs, context: leave(obs, context)})
    batcher = Batcher(policy, Batching(mode="fast"), max_rows=16, max_wait=0.0)
    for _ in range(2):
        with pytest.raises(PolicyError, match="SystemExit: 3"):
            batcher.submit(0, make_request(1)).result(timeout=30.0)
    batcher.close()


def test_closing_drops_what_is_queued_and_takes_no_more() -> None:
    policy = Gate(closed=True)
    batcher = Batcher(policy, Batching(mode="fast"), max_rows=16, max_wait=0.0)
    running = batcher.submit(0, make_request(1))
    assert policy.entered.acquire(timeout=30.0)
    queued = batcher.submit(1, make_request(1))
    policy.allowed.release()
    batcher.close()
    assert numbers(running) == [0.0]
    assert queued.cancelled() or queued.done()
    with pytest.raises(LifecycleError, match="closed"):
        batcher.submit(0, make_request(1))


class Remembering(Gate):
    """Notes which episodes begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[int, int]] = []
        self.ended: list[tuple[int, int]] = []

    def begin(self, rows: EpisodeRows) -> None:
        self.begun += rows.keys()

    def end(self, rows: EpisodeRows) -> None:
        self.ended += rows.keys()


def test_a_policy_with_memory_is_told_of_the_episodes_of_every_client() -> None:
    policy = Remembering()
    batcher = Batcher(policy, Batching(mode="fast"), max_rows=16, max_wait=FOREVER)
    batcher.join(0)
    assert numbers(batcher.submit(0, make_request(1, seed=3, first_episode=8))) == [308.0]
    batcher.join(1)
    one, two = (make_request(1, seed=seed) for seed in (3, 4))
    ended = EpisodeRows(seeds=torch.tensor([3]), episode_ids=torch.tensor([8]), instructions=("",))
    one = type(one)(obs=one.obs, context=one.context, ended=ended)
    futures = [batcher.submit(0, one), batcher.submit(1, two)]
    assert [numbers(future) for future in futures] == [[300.0], [400.0]]
    assert sorted(policy.begun) == [(3, 0), (3, 8), (4, 0)]
    assert policy.ended == [(3, 8)]
    batcher.close()


class Keeper(Gate):
    """Remembers which episodes play."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: set[tuple[int, int]] = set()

    def begin(self, rows: EpisodeRows) -> None:
        self.kept |= set(rows.keys())

    def end(self, rows: EpisodeRows) -> None:
        for key in rows.keys():  # noqa: SIM118  # not a dict
            self.kept.remove(key)


def test_clients_that_leave_end_their_episodes_and_one_that_comes_back_goes_on() -> None:
    policy = Keeper()
    batcher = Batcher(policy, Batching(mode="fast"), max_rows=16, max_wait=0.0, linger=0.2)
    for client in range(50):
        batcher.join(client)
        numbers(batcher.submit(client, make_request(1, first_episode=client)))
    for client in range(50):
        batcher.leave(client)
    batcher.join(50)  # as client 3, whose connection was lost
    again = make_request(1, first_episode=3)
    later = replace(again, context=replace(again.context, chunk_index=torch.ones(1, dtype=torch.int64)))
    assert numbers(batcher.submit(50, later)) == [3.0]
    deadline = time.monotonic() + 20.0
    while len(policy.kept) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert policy.kept == {(0, 3)}
    batcher.close()


def test_a_chunk_without_a_beginning_is_refused_and_an_end_that_is_not_known_is_left_out() -> None:
    policy = Keeper()
    batcher = Batcher(policy, Batching(mode="fast"), max_rows=16, max_wait=0.0)
    request = make_request(1, first_episode=7)
    fifth = replace(request, context=replace(request.context, chunk_index=torch.full((1,), 5)))
    with pytest.raises(DataError, match=r"expected chunk 0 of episode 7 \(seed 0\) first, got chunk 5"):
        numbers(batcher.submit(0, fifth))
    over = EpisodeRows(seeds=torch.zeros(1, dtype=torch.int64), episode_ids=torch.tensor([8]), instructions=("",))
    assert numbers(batcher.submit(0, replace(request, ended=over))) == [7.0]
    assert policy.kept == {(0, 7)}
    batcher.close()
