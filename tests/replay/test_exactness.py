"""Every field of every sample, against a store that keeps everything."""

from __future__ import annotations

import tempfile
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_reference import NaiveStore, Stream, bits, check_batch

from headrace.replay import (
    ArraySpec,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TrajectorySampler,
    UniformSampler,
)
from headrace.types import StackSpec

DTYPES = [torch.uint8, torch.float32, torch.float64, torch.float16, torch.int64, torch.bool]


@st.composite
def layouts(draw):
    """Spaces (stacked) and their stacks: one bare array, groups, or nested groups."""
    names = draw(st.sampled_from([[""], ["policy"], ["policy", "critic"], ["cam/left", "cam/right", "state"]]))
    spaces, stack = {}, {}
    for name in names:
        frame = tuple(draw(st.lists(st.integers(1, 3), min_size=0, max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        frames = draw(st.integers(0, 5))
        if frames:
            kind = draw(st.sampled_from(["concat", "new_axis"])) if frame else "new_axis"
            rank = len(frame) + (kind == "new_axis")
            dim = draw(st.integers(-rank, rank - 1))
            spec = StackSpec(frames=frames, dim=dim, layout=kind, reset=draw(st.sampled_from(["repeat", "zero"])))
            stack[name] = spec
            frame = spec.stacked_shape(frame)
        spaces[name] = ArraySpec(frame, dtype)
    return spaces, stack


def nested(flat):
    """Leaf names → values as the nested dict, or the bare value, that a user gives."""
    if set(flat) == {""}:
        return flat[""]
    out = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        branch = out
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    return out


def feed(buffer, store, stream, steps, action, *, hand_on=False):
    """Extend both. ``hand_on``: as loops do, give the tensors of the last step again, changed in place at a jump."""
    last = None
    for _ in range(steps):
        obs, act, step, active = stream.step(action)
        store.extend(obs, act, step, active, stream.autoreset)
        if hand_on:
            if last is not None:
                for name, value in last.items():
                    if bits(value) != bits(obs[name]):
                        value.copy_(obs[name])
                obs = last
            last = step.obs
        info = dict(step.info)
        if "final_obs" in info:
            info["final_obs"] = nested(info["final_obs"])
        buffer.extend(nested(obs), act, step._replace(obs=nested(step.obs), info=info), active)


STREAMS = given(
    layout=layouts(),
    num_envs=st.integers(1, 4),
    length=st.integers(1, 12),
    steps=st.integers(1, 40),
    n_step=st.integers(1, 5),
    sampler=st.sampled_from(
        ["uniform", "once", "prioritized", "slices", "burn_in", "favored", "padded", "trajectories"]
    ),
    where=st.sampled_from(["memory", "memory", "disk", "lz4", "followed"]),
    autoreset=st.sampled_from(["same_step", "disabled"]),
    action=st.sampled_from(
        [ArraySpec((), torch.int64), ArraySpec((3,), torch.float32), ArraySpec((2, 2), torch.uint8)]
    ),
    seed=st.integers(0, 10_000),
    end_rate=st.sampled_from([0.0, 0.1, 0.5]),
    hand_on=st.booleans(),
    old=st.booleans(),
)
"""Streams of steps into stores of every kind.

``followed`` is on disk and compared through a reader. ``old``: as if all stacks had been compared often enough, so that
plain steps are written by one kernel from the first on.
"""


@pytest.mark.filterwarnings("ignore:ReplayBuffer.*did not go on")
@settings(deadline=None, max_examples=150)
@STREAMS
def test_every_field_equals_a_store_that_keeps_everything(**drawn):
    check_stream(**drawn)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ReplayBuffer.*did not go on")
@settings(deadline=None, max_examples=2500)
@STREAMS
def test_thousands_of_streams_equal_a_store_that_keeps_everything(**drawn):
    check_stream(**drawn)


@pytest.mark.filterwarnings("ignore:ReplayBuffer.*did not go on")
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(1, 12),
    frames=st.integers(1, 4),
    reset=st.sampled_from(["repeat", "zero"]),
    jumps=st.booleans(),
)
def test_plain_steps_and_the_general_write_leave_the_same_store(seed, length, frames, reset, jumps):
    spaces = {"cam": ArraySpec((frames, 3), torch.uint8), "state": ArraySpec((2,), torch.float32)}
    stack = {"cam": StackSpec(frames=frames, dim=0, layout="new_axis", reset=reset)}
    action, found = ArraySpec((2,), torch.float32), []
    buffers = [ReplayBuffer(3 * length, 3, spaces, action, stack=stack) for _ in range(2)]
    for buffer in buffers:
        buffer.store.stacks.young = False
        stream = Stream(seed, 3, spaces, stack, "same_step")
        stream.jump_rate = stream.jump_rate if jumps else 0.0
        stepping = buffer.store._stepping
        write = stepping.write
        stepping.write = lambda *args, write=write: found.append(write(*args)) or found[-1]
        stepping.possible = buffer is buffers[0]
        feed(buffer, NaiveStore(3, length), stream, 40, action)
    # left to the general write: jumps, and stacks that begin in the middle of an episode
    assert sum(write is not None for write in found) > (5 if jumps else 30)
    plain, general = (buffer.store for buffer in buffers)
    assert plain.pool.side.used == general.pool.side.used
    index = buffers[0].indices()
    assert torch.equal(index, buffers[1].indices())
    batches = [buffer.get(index).flatten_keys() for buffer in buffers]
    assert all(bits(value) == bits(batches[1][key]) for key, value in batches[0].items())
    if None not in found:  # the general write takes other rows of the side table after a refusal
        one, other = ({name: block.tobytes() for name, block in s.blocks().items()} for s in (plain, general))
        assert one == other


@pytest.mark.filterwarnings("ignore:ReplayBuffer.*did not go on")
@pytest.mark.parametrize("sampler", ["uniform", "once", "prioritized", "slices", "favored", "padded", "trajectories"])
def test_a_reader_that_follows_a_writer_keeps_its_index_right(sampler):
    layout, action = ({"": ArraySpec((2,), torch.float32)}, {}), ArraySpec((), torch.int64)
    for seed in range(5):
        check_stream(layout, 2, 12, 40, 1, sampler, "followed", "same_step", action, seed, 0.3, False, seed % 2 == 0)


def check_stream(
    layout, num_envs, length, steps, n_step, sampler, where, autoreset, action, seed, end_rate, hand_on, old
):
    spaces, stack = layout
    gamma = 0.9
    run = min(3, length)
    make = {
        "uniform": UniformSampler,
        "prioritized": PrioritizedSampler,
        "slices": lambda: SliceSampler(run),
        "burn_in": lambda: SliceSampler(max(run - 1, 1), burn_in=run - max(run - 1, 1)),
        "once": SamplerWithoutReplacement,
        "favored": lambda: PrioritizedSampler(run),
        "padded": lambda: SliceSampler(run, strict=False, span=True),
        "trajectories": TrajectorySampler,
    }[sampler]
    with tempfile.TemporaryDirectory() as directory:
        buffer = ReplayBuffer(
            length * num_envs, num_envs, nested(spaces), action, stack=stack, sampler=make(), n_step=n_step,
            gamma=gamma, autoreset=autoreset, directory=directory if where in ("disk", "followed") else None,
            codec="lz4" if where == "lz4" else None,
        )  # fmt: skip
        if old:
            buffer.store.stacks.young = False
        seen = ReplayBuffer.open(directory, read_only=True, sampler=make()) if where == "followed" else buffer
        compare(buffer, seen, spaces, stack, steps, n_step, gamma, sampler, run, action, seed, end_rate, hand_on)
        buffer.close()


def compare(writer, buffer, spaces, stack, steps, n_step, gamma, sampler, run, action, seed, end_rate, hand_on):
    """Feed a buffer and the reference, and compare everything four times on the way, as ``buffer`` sees it."""
    num_envs, length, autoreset = buffer.num_envs, buffer.spec.length, buffer.spec.autoreset
    store = NaiveStore(num_envs, length)
    stream = Stream(seed, num_envs, spaces, stack, autoreset)
    stream.end_rate = end_rate
    for part in range(4):
        feed(writer, store, stream, (steps + 3 - part) // 4, action, hand_on=hand_on)
        assert len(buffer) == sum(len(rows) for rows in store.rows)
        assert sorted(buffer.indices().tolist()) == sorted(store.index())
        if len(buffer):
            # every position
            check_batch(buffer.get(buffer.indices()), store, n_step, gamma)
            check_batch(buffer.at(torch.arange(len(buffer))), store, n_step, gamma)
            check_samples(buffer, store, sampler, run, n_step, gamma)


def runs(store: NaiveStore, run: int) -> set[tuple[int, int]]:
    """(environment, place) of every run inside one trajectory."""
    return {
        (e, place)
        for e, rows in enumerate(store.rows)
        for place in range(len(rows) - run + 1)
        if rows[place].trajectory == rows[place + run - 1].trajectory
    }


def whole(store: NaiveStore) -> dict[int, int]:
    """Trajectory id → length, of those that are stored from first to last transition."""
    out = {}
    for rows in store.rows:
        for trajectory, size in Counter(row.trajectory for row in rows).items():
            mine = [row for row in rows if row.trajectory == trajectory]
            if mine[0].step == 0 and (mine[-1].terminated or mine[-1].truncated or mine[-1].cut):
                out[trajectory] = size
    return out


def check_samples(buffer, store, sampler, run, n_step, gamma):
    where = store.index()
    if sampler == "padded":
        check_batch(buffer.sample(20), store, n_step, gamma)
    elif sampler in ("uniform", "once", "prioritized"):
        batch = buffer.sample(len(buffer))
        check_batch(batch, store, n_step, gamma)
        if sampler == "prioritized":
            buffer.update_priorities(batch["index"], torch.arange(len(buffer)).double())
            check_batch(buffer.sample(len(buffer)), store, n_step, gamma)
        if sampler == "once":
            assert len(set(batch["index"].tolist())) == len(buffer) or buffer.sampler.epoch > 1
    elif sampler in ("slices", "burn_in", "favored"):
        possible = runs(store, run)
        if possible:
            batch = buffer.sample(len(possible))
            assert batch.shape == (len(possible), run)
            check_batch(batch, store, n_step, gamma)
            grid = batch["index"].reshape(len(possible), run)
            for row in grid:
                places = [where[int(i)] for i in row]
                assert places[0] in possible
                assert places == [(places[0][0], places[0][1] + k) for k in range(run)]
    else:
        possible = whole(store)
        if possible:
            batch = buffer.sample(len(possible))
            check_batch(batch, store, n_step, gamma)
            ids, steps = batch["collector", "traj_ids"].tolist(), batch["step_count"].flatten().tolist()
            at = 0
            while at < len(ids):
                size = possible[ids[at]]
                assert ids[at : at + size] == [ids[at]] * size
                assert steps[at : at + size] == list(range(size))
                at += size


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), run=st.integers(1, 5))
def test_slices_and_trajectories_reach_every_possible_item(seed, run):
    spaces, action = {"": ArraySpec((), torch.int64)}, ArraySpec((), torch.int64)
    stores = [NaiveStore(3, 8) for _ in range(3)]
    samplers = [UniformSampler(), SliceSampler(run), TrajectorySampler()]
    buffers = [ReplayBuffer(24, 3, spaces[""], action, sampler=sampler, seed=seed) for sampler in samplers]
    for buffer, store in zip(buffers, stores, strict=True):
        feed(buffer, store, Stream(seed, 3, spaces, {}, "same_step"), 25, action)
    store = stores[0]
    where = store.index()
    expected = [set(where.values()), runs(store, run), set(whole(store))]
    for kind, buffer in enumerate(buffers):
        if not expected[kind]:
            continue
        seen = set()
        for _ in range(60):
            batch = buffer.sample(len(expected[kind]))
            if kind == 2:
                seen |= set(batch["collector", "traj_ids"].tolist())
            else:
                first = batch["index"].reshape(len(expected[kind]), -1)[:, 0]
                seen |= {where[int(i)] for i in first}
        assert seen == expected[kind]


def test_uniform_draws_are_uniform_over_ragged_rings():
    spaces, action = {"": ArraySpec((), torch.int64)}, ArraySpec((), torch.int64)
    buffer, store = ReplayBuffer(60, 3, spaces[""], action), NaiveStore(3, 20)
    stream = Stream(3, 3, spaces, {}, "same_step")
    stream.idle_rate = 0.6
    feed(buffer, store, stream, 14, action)
    sizes = [len(rows) for rows in store.rows]
    assert len(set(sizes)) > 1
    draws = 400
    seen = Counter(i for _ in range(draws) for i in buffer.sample(len(buffer))["index"].tolist())
    counts = np.array([seen[i] for i in store.index()])
    # each count is binomial with mean 400 and standard deviation below 20: six of them allow no false alarm in practice
    assert np.abs(counts - draws).max() < 6 * 20
