"""Several processes write, each into its own store, and one view reads all of them as if they were one."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from followed_store import ACTION, LENGTH, NUM_ENVS, OBSERVATION, STACK
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_reference import NaiveStore, Stream, check_batch
from test_exactness import feed, layouts, nested
from test_readers import check_rows

from headrace.envs.recipe import EnvRecipe
from headrace.errors import ConfigError, LifecycleError
from headrace.learning import collect
from headrace.learning.collecting import Collector
from headrace.replay import (
    ArraySpec,
    PrioritizedSampler,
    ReplayBuffer,
    SharedReplay,
    SliceSampler,
    TrajectorySampler,
    UniformSampler,
)

PROGRAM = Path(__file__).with_name("followed_store.py")
SPACES = {"policy": ArraySpec((3,), torch.float32)}
MOVE = ArraySpec((2,), torch.float32)


def filled(path: Path, **settings) -> tuple[SharedReplay, list[ReplayBuffer]]:
    """Two stores of two and one environments, which hold 40 and 30 transitions; they are still written to."""
    shared = SharedReplay.create(path, 2, 90, 3, SPACES, MOVE, autoreset="disabled", seed=5, **settings)
    stores = [ReplayBuffer.open(place) for place in shared.paths]
    for number, store in enumerate(stores):
        stream = Stream(number, store.num_envs, SPACES, {}, "disabled")
        while len(store) < (40, 30)[number]:
            obs, action, step, active = stream.step(MOVE)
            store.extend(obs, action, step, active)
    return shared, stores


def test_every_transition_of_all_stores_is_equally_likely_and_has_a_name_of_its_own(tmp_path):
    shared, stores = filled(tmp_path)
    held = [len(store) for store in stores]
    batches = [shared.sample(sum(held)) for _ in range(4)]
    for batch in batches:
        assert batch["origin"].bincount().tolist() == held, "shares are those of what is stored"
        again = shared.get(batch["index"])
        assert (again == batch).all()
        for number, store in enumerate(stores):
            rows = batch["origin"] == number
            mine = store.get(batch["index"][rows] // 2)
            assert torch.equal(mine["observation", "policy"], batch["observation", "policy"][rows])
    assert len(shared) == sum(held)
    assert len(set(shared.get(batch["index"])["index"].tolist())) == len(set(batch["index"].tolist()))


@pytest.mark.parametrize("length", [None, 3])
def test_priorities_and_weights_are_those_of_one_buffer(tmp_path, length):
    sampler = PrioritizedSampler(length, alpha=1.0, beta=0.5, eps=1e-12)
    shared, stores = filled(tmp_path, sampler=sampler, n_step=2 if length is None else 1)
    seen = shared.sample(400)
    index = seen["index"] if length is None else seen["index"][:, 0]
    index = index.unique()
    priority = 1.0 + index.double() % 7
    shared.update_priorities(index, priority)
    batch = shared.sample(2000)
    drawn = batch["index"] if length is None else batch["index"][:, 0]
    weight = batch["_weight"] if length is None else batch["_weight"][:, 0]
    known = torch.isin(drawn, index)
    given = 1.0 + drawn[known].double() % 7
    lowest = min(float(priority.min()), 1.0)
    torch.testing.assert_close(weight[known], ((lowest / given) ** 0.5).float())
    mass = [store.sampler.mass for store in shared.stores]
    share = torch.tensor(mass) / sum(mass) * 2000
    assert (batch["origin"].reshape(2000, -1)[:, 0].bincount() - share).abs().max() <= 1.5
    # what is written afterwards has the largest priority, whichever store it is in
    stream = Stream(9, 1, SPACES, {}, "disabled")
    for _ in range(4):
        obs, action, step, _ = stream.step(MOVE)
        stores[1].extend(obs, action, step)
    shared.sample(10)
    assert {round(store.sampler.largest, 9) for store in shared.stores} == {float(priority.max())}
    assert shared.stores[1].sampler.mass > mass[1]


def test_runs_of_all_stores_and_stores_without_any(tmp_path):
    shared = SharedReplay.create(tmp_path / "empty", 2, 90, 3, SPACES, MOVE, sampler=SliceSampler(4))
    with pytest.raises(LifecycleError, match="stored nothing that could be drawn"):
        shared.sample(1)
    store, stream = ReplayBuffer.open(shared.paths[1]), Stream(0, 1, SPACES, {}, "same_step")
    for _ in range(30):
        obs, action, step, active = stream.step(MOVE)
        store.extend(obs, action, step, active)
    batch = shared.sample(50)
    assert batch.shape == (50, 4)
    assert (batch["origin"] == 1).all()
    assert (batch["collector", "traj_ids"] == batch["collector", "traj_ids"][:, :1]).all()


def test_workers_write_what_one_process_would_have_collected(tmp_path):
    recipe = EnvRecipe("cartpole", num_envs=3, seed=2, overrides={"episode_length": 9})
    space, moves = ArraySpec((4,), torch.float32), ArraySpec((1,), torch.float32)
    shared = SharedReplay.create(tmp_path, 2, 300, 3, {"policy": space}, moves)
    with Collector(recipe, push, workers=2) as collector:
        collector.fill(shared, 20)
        with pytest.raises(LifecycleError, match="another"):
            ReplayBuffer.open(shared.paths[0])
        collector.fill(shared, 15)
        assert collector.collect(5).shape == (3, 5)
        with pytest.raises(ConfigError, match="2 writers and 3 environments"):
            collector.fill(SharedReplay.create(tmp_path / "other", 3, 300, 3, {"policy": space}, moves), 5)
    expected = collect(recipe, push, 35)
    envs = [(0, 0), (0, 1), (1, 0)]
    for number, (store, env) in enumerate(envs):
        kept = shared.stores[store]
        mine = kept.get(torch.arange(35) * kept.num_envs + env)
        for key in ("action", ("observation", "policy"), ("next", "observation", "policy"), ("next", "done")):
            assert torch.equal(mine[key], expected[key][number]), key
        assert torch.equal(mine["step_count"], expected["step_count"][number])


def push(obs):
    """Push to the side that the pole leans to, rows by themselves."""
    return torch.sign(obs["policy"][:, 1:2])


def wait(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_killed_writer_loses_nothing_committed_and_blocks_nothing(tmp_path):
    shared = SharedReplay.create(
        tmp_path,
        2,
        2 * NUM_ENVS * LENGTH,
        2 * NUM_ENVS,
        OBSERVATION,
        ACTION,
        stack=STACK,
        sampler=PrioritizedSampler(2),
    )
    programs = [subprocess.Popen([sys.executable, str(PROGRAM), str(path)], stdout=-1) for path in shared.paths]
    try:
        assert all(program.stdout.readline() == b"ready\n" for program in programs)
        check_rows(shared.sample(32))
        programs[0].kill()
        programs[0].wait()
        dead, living = shared.stores
        left, before = dead.written.clone(), living.written.clone()
        stored = dead.get(dead.indices())
        wait(lambda: (living.written > before + LENGTH).all())
        for _ in range(20):
            batch = shared.sample(64)
            check_rows(batch)
            assert set(batch["origin"].flatten().tolist()) == {0, 1}
        assert torch.equal(dead.written, left)
        assert (dead.get(dead.indices()) == stored).all()
        programs[0].stdout.close()
        programs[0] = subprocess.Popen([sys.executable, str(PROGRAM), str(shared.paths[0])], stdout=-1)
        assert programs[0].stdout.readline() == b"ready\n"
        wait(lambda: (dead.written > left + 50).all())
        check_rows(shared.sample(64))
    finally:
        for program in programs:
            program.kill()
            program.wait()
            program.stdout.close()


SAMPLERS = {
    "uniform": UniformSampler,
    "prioritized": PrioritizedSampler,
    "slices": lambda: SliceSampler(2),
    "padded": lambda: SliceSampler(3, strict=False),
    "trajectories": TrajectorySampler,
}
WRITERS = given(
    layout=layouts(),
    writers=st.integers(1, 3),
    more=st.integers(0, 2),
    length=st.integers(3, 10),
    n_step=st.integers(1, 3),
    sampler=st.sampled_from(list(SAMPLERS)),
    autoreset=st.sampled_from(["same_step", "disabled"]),
    seed=st.integers(0, 10_000),
)


def check_writers(layout, writers, more, length, n_step, sampler, autoreset, seed) -> None:
    """Write to some stores in turns, and compare what the view over them gives with stores that keep everything."""
    spaces, stack = layout
    num_envs, turns = writers + more, random.Random(seed)
    settings_ = {"stack": nested(stack) if set(stack) == {""} else stack, "n_step": n_step, "autoreset": autoreset}
    with tempfile.TemporaryDirectory() as folder:
        shared = SharedReplay.create(
            folder, writers, length * num_envs, num_envs, nested(spaces), MOVE, sampler=SAMPLERS[sampler](), **settings_
        )
        parts = []
        for number, place in enumerate(shared.paths):
            buffer = ReplayBuffer.open(place)
            stream = Stream(seed + number, buffer.num_envs, spaces, stack, autoreset)
            parts.append((buffer, NaiveStore(buffer.num_envs, length), stream))
        for _ in range(8):
            feed(*turns.choice(parts), turns.randint(1, 8), MOVE)
            if turns.random() < 0.5:
                continue
            try:
                batch = shared.sample(turns.choice([1, 7, 16]))
            except LifecycleError:  # no slice and no whole trajectory yet
                continue
            flat = batch.reshape(-1)
            for number, (_, naive, _) in enumerate(parts):
                rows = flat[flat["origin"] == number]
                rows["index"] = rows["index"] // writers
                rows["collector", "traj_ids"] = rows["collector", "traj_ids"] // writers
                check_batch(rows, naive, n_step, 0.99)
        for buffer, *_ in parts:
            buffer.close()


@pytest.mark.filterwarnings("ignore:ReplayBuffer.*did not go on")
@settings(deadline=None, max_examples=15)
@WRITERS
def test_what_several_writers_store_equals_stores_that_keep_everything(**drawn):
    check_writers(**drawn)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ReplayBuffer.*did not go on")
@settings(deadline=None, max_examples=1000)
@WRITERS
def test_a_thousand_streams_of_several_writers_equal_stores_that_keep_everything(**drawn):
    check_writers(**drawn)
