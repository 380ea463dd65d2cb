"""Several samplers over one store: what each draws, against the reference; and their state, saved and loaded."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_reference import NaiveStore, Stream, check_batch

from headrace.errors import ConfigError, LifecycleError, ShapeError
from headrace.replay import (
    ArraySpec,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TrajectorySampler,
    UniformSampler,
)

pytestmark = pytest.mark.filterwarnings("ignore:ReplayBuffer.*did not go on")
SPACE, ACTION = ArraySpec((), torch.int64), ArraySpec((), torch.int64)
KINDS = {
    "replaced": UniformSampler,
    "once": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(3),
    "short": lambda: SliceSampler(3, strict=False),
    "spanning": lambda: SliceSampler(2, burn_in=1, strict=False, span=True),
    "priorities": PrioritizedSampler,
    "favored": lambda: PrioritizedSampler(2, burn_in=1),
    "whole": TrajectorySampler,
}


def feed(buffers, store: NaiveStore, stream: Stream, steps: int) -> None:
    for _ in range(steps):
        obs, action, step, active = stream.step(ACTION)
        store.extend(obs, action, step, active, "same_step")
        info = {k: v[""] if k == "final_obs" else v for k, v in step.info.items()}
        for buffer in buffers:
            buffer.extend(obs[""], action, step._replace(obs=step.obs[""], info=info), active)


def filled(steps=25, num_envs=3, length=8, seed=0, **settings):
    """A buffer with every kind of sampler over it, its reference and its stream."""
    buffer = ReplayBuffer(length * num_envs, num_envs, SPACE, ACTION, **settings)
    for name, kind in KINDS.items():
        buffer.with_sampler(kind(), name, seed=seed)
    store, stream = NaiveStore(num_envs, length), Stream(seed, num_envs, {"": SPACE}, {}, "same_step")
    feed([buffer], store, stream, steps)
    return buffer, store, stream


def trajectories(store: NaiveStore) -> dict[int, list[int]]:
    """Trajectory → ``index`` of its stored transitions."""
    found: dict[int, list[int]] = {}
    for index, (e, place) in sorted(store.index().items()):
        found.setdefault(store.rows[e][place].trajectory, []).append(index)
    return found


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), steps=st.integers(6, 40), length=st.integers(3, 9))
def test_every_view_of_one_store_is_exact(seed, steps, length):
    buffer, store, stream = filled(steps, length=length, seed=seed)
    feed([buffer], store, stream, 3)
    for view in buffer.views.values():
        try:
            batch = view.sample(20)
        except LifecycleError:
            assert view.name in ("slices", "spanning", "favored", "whole", "short"), view.name
            continue
        check_batch(batch, store, 1, 0.99)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), before=st.integers(0, 3), after=st.integers(0, 3), strict=st.booleans())
def test_padded_slices_are_all_runs_that_settings_allow(seed, before, after, strict):
    run = 4
    buffer, store, _ = filled(seed=seed)
    view = buffer.with_sampler(SliceSampler(run, strict=strict, span=(before, after)), "padded")
    expected = set()
    for rows in trajectories(store).values():
        if strict and len(rows) < run:
            continue
        for start in range(-before, min(max(len(rows) - run, 0) + after, len(rows) - 1) + 1):
            expected.add(tuple(rows[max(start, 0) : start + run]))
    if not expected:
        with pytest.raises(LifecycleError, match="slices of 4"):
            view.sample(1)
        return
    seen = set()
    for count in range(40):
        batch = view.sample(2 * len(expected))
        if count % 5 == 0:  # the slow reference, over twice all runs each time
            check_batch(batch, store, 1, 0.99)
        mask = batch.get("mask", torch.ones(batch.shape, dtype=torch.bool))
        for index, valid in zip(batch["index"], mask, strict=True):
            real = tuple(index[valid].tolist())
            assert real
            assert set(index.tolist()) == set(real), "padding repeats transitions of its run"
            seen.add(real)
    assert seen == expected


def test_an_epoch_without_replacement_has_every_transition_once():
    buffer, store, stream = filled()
    view = buffer.views["once"]
    for epoch in range(1, 4):
        drawn = []
        while len(drawn) < len(buffer):
            drawn += view.sample(min(5, len(buffer) - len(drawn)))["index"].tolist()
        assert sorted(drawn) == sorted(store.index())
        assert view.sampler.epoch == epoch
    # what is overwritten in the middle of an epoch is passed over, what is new waits for the next one
    before = set(store.index())
    first = view.sample(4)["index"].tolist()
    feed([buffer], store, stream, 4)
    still = before & set(store.index()) - set(first)
    rest = [int(view.sample(1)["index"]) for _ in range(len(still))]
    assert sorted(rest) == sorted(still)
    assert view.sampler.epoch == 4
    assert len(set(view.sample(len(buffer))["index"].tolist())) == len(buffer)


def test_runs_of_a_prioritized_sampler_need_a_length():
    for wrong in ({"burn_in": 2}, {"length": 0}, {"length": 3, "burn_in": -1}, {"length": 3, "eta": 1.5}):
        with pytest.raises(ConfigError, match=r"expected|length"):
            PrioritizedSampler(**wrong)
    assert PrioritizedSampler(3, burn_in=1).config()["kind"] == "prioritized_slices"  # as stores on disk name it


def test_prioritized_slices_follow_the_priorities_of_their_runs():
    buffer, store, _ = filled(steps=12, length=20)
    sampler = PrioritizedSampler(2, burn_in=1, alpha=1.0, beta=0.5, eps=1e-12, eta=0.75)
    view = buffer.with_sampler(sampler, "runs")
    starts = sorted(rows[k] for rows in trajectories(store).values() for k in range(len(rows) - 2))
    assert len(starts) > 3
    index = torch.tensor(starts)
    priority = torch.arange(1.0, len(starts) + 1)
    view.update_priorities(index, priority)
    seen = Counter()
    for _ in range(100):
        batch = view.sample(100)
        assert batch.shape == (100, 3)
        assert torch.equal(batch["burn_in"][0], torch.tensor([True, False, False]))
        seen.update(batch["index"][:, 0].tolist())
        place = torch.searchsorted(index, batch["index"][:, 0].contiguous())
        assert torch.allclose(batch["_weight"], ((1 / priority[place]) ** 0.5)[:, None])
    expected = 10_000 * priority / priority.sum()
    counts = torch.tensor([float(seen[i]) for i in starts])
    # binomial: standard deviation below sqrt(expected); six of them
    assert ((counts - expected).abs() < 6 * expected.sqrt()).all()
    # TD errors of all transitions: 0.75 · max + 0.25 · mean of those after the burn-in
    batch = view.sample(1)
    view.update_priorities(batch["index"], torch.tensor([[100.0, 2.0, -4.0]]))
    row = sampler._tree.leaves[_row(buffer, int(batch["index"][0, 0]))]
    assert row == pytest.approx(0.75 * 4 + 0.25 * 3)
    # an index that begins no run is passed over
    leaves = sampler._tree.leaves.copy()
    last = torch.tensor([sorted(store.index())[-1]])
    view.update_priorities(last, torch.tensor([50.0]))
    assert np.array_equal(sampler._tree.leaves, leaves)
    with pytest.raises(ShapeError, match="one per index"):
        view.update_priorities(index, priority[:2])


def _row(buffer: ReplayBuffer, index: int) -> int:
    position, env = divmod(index, buffer.num_envs)
    pool = buffer.store.pool
    return env * pool.slots + position % pool.slots


@pytest.mark.parametrize("form", ["checkpoint", "copy", "pickle", "disk"])
def test_all_samplers_go_on_after_saving(form, tmp_path):
    directory = tmp_path / "store" if form == "disk" else None
    buffer, store, stream = filled(directory=directory)
    twin, twin_store, twin_stream = filled()
    for each in (buffer, twin):
        for name in ("priorities", "favored"):
            batch = each.views[name].sample(7)
            each.views[name].update_priorities(batch["index"], torch.rand(batch.shape, generator=torch.manual_seed(3)))
            each.views[name].sampler.beta = 0.77
        each.views["once"].sample(5)
    if form == "checkpoint":
        buffer.save(tmp_path / "saved")
        again = ReplayBuffer.load(tmp_path / "saved", verify=True)
    elif form == "disk":
        buffer.close()
        again = ReplayBuffer.open(tmp_path / "store")
    else:
        again = copy.deepcopy(buffer) if form == "copy" else pickle.loads(pickle.dumps(buffer))
    assert list(again.views) == ["main", *KINDS]
    assert again.views["favored"].sampler.beta == 0.77
    for _ in range(2):
        for name, view in twin.views.items():
            assert (again.views[name].sample(6) == view.sample(6)).all(), name
        feed([again], store, stream, 6)
        feed([twin], twin_store, twin_stream, 6)


def test_views_have_settings_of_their_own():
    buffer, store, _ = filled()
    three = buffer.with_sampler(UniformSampler(), "three", n_step=3, gamma=0.5, seed=9)
    check_batch(three.sample(30), store, 3, 0.5)
    check_batch(buffer.sample(30), store, 1, 0.99)
    with pytest.raises(ConfigError, match="expected a new name"):
        buffer.with_sampler(UniformSampler(), "three")
    with pytest.raises(ConfigError, match="another buffer"):
        ReplayBuffer(12, 3, SPACE, ACTION, sampler=three.sampler)
    with pytest.raises(ConfigError, match="span below the run"):
        SliceSampler(3, span=3)
    buffer.clear()
    for view in buffer.views.values():
        with pytest.raises(LifecycleError, match="got none"):
            view.sample(1)
