"""Whole batches into a store: equal to the same steps one by one; compact and delta forms lose what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_reference import NaiveStore, Stream, bits, check_batch
from tensordict import TensorDict

from headrace.errors import DataError, DtypeError, LifecycleError, ShapeError
from headrace.replay import ArraySpec, PrioritizedSampler, ReplayBuffer, SliceSampler, TrajectorySampler
from headrace.replay.forms import to_delta
from headrace.types import StackSpec

pytestmark = pytest.mark.filterwarnings("ignore:ReplayBuffer.*did not go on")
ACTION = ArraySpec((2,), torch.float32)
LOG_PROB = ArraySpec((), torch.float32)
STACKED = StackSpec(frames=3, dim=0)
SPACES = {
    "plain": ({"": ArraySpec((4,), torch.float32)}, {}),
    "stack": ({"": ArraySpec((3, 5), torch.float32)}, {"": STACKED}),
    "groups": (
        {"a": ArraySpec((3, 2, 2), torch.float32), "b": ArraySpec((2,), torch.float64)},
        {"a": StackSpec(frames=3, dim=0, reset="zero")},
    ),
    "interleaved": ({"": ArraySpec((2, 6), torch.float32)}, {"": StackSpec(frames=3, dim=-1)}),
}


def nested(flat):
    return flat[""] if set(flat) == {""} else dict(flat)


def batch_of(steps, store: NaiveStore, *, ids: bool) -> TensorDict:
    """The steps as (N, T); feeds the reference on the way, which says where trajectories begin."""
    columns = []
    for obs, action, step, active in steps:
        store.extend(obs, action, step, active, "same_step")
        done = step.terminated | step.truncated
        final = step.info.get("final_obs", step.obs)
        shape = [len(done)]
        following = {
            name: torch.where(done.view(-1, *[1] * (value.dim() - 1)), final[name], value)
            for name, value in step.obs.items()
        }
        content = {
            "observation": nested(obs),
            "action": action,
            "log_prob": step.reward * 2,
            "active": torch.ones(shape, dtype=torch.bool) if active is None else active,
            "next": {
                "observation": nested(following),
                "reward": step.reward[:, None],
                "done": done[:, None],
                "terminated": step.terminated[:, None],
                "truncated": step.truncated[:, None],
            },
        }
        if ids:
            newest = [rows[-1].trajectory if rows else 0 for rows in store.rows]
            content["collector"] = {"traj_ids": torch.tensor(newest)}
        columns.append(TensorDict(content, shape))
    return torch.stack(columns, 1)


def make(layout: str, num_envs: int, length: int, **settings) -> ReplayBuffer:
    spaces, stack = SPACES[layout]
    extras = {"log_prob": LOG_PROB}
    return ReplayBuffer(length * num_envs, num_envs, nested(spaces), ACTION, stack=stack, extras=extras, **settings)


def samplers():
    return {
        "uniform": lambda: None,
        "prioritized": PrioritizedSampler,
        "slices": lambda: SliceSampler(2),
        "trajectories": TrajectorySampler,
    }


BATCHES = given(
    layout=st.sampled_from(sorted(SPACES)),
    num_envs=st.integers(1, 3),
    length=st.integers(2, 9),
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    ids=st.booleans(),
    sampler=st.sampled_from(sorted(samplers())),
    seed=st.integers(0, 10_000),
    end_rate=st.sampled_from([0.0, 0.2, 0.5]),
)


@settings(deadline=None, max_examples=60)
@BATCHES
def test_batches_give_the_same_store_as_their_steps(**drawn):
    check_batches(**drawn)


@pytest.mark.slow
@settings(deadline=None, max_examples=1000)
@BATCHES
def test_a_thousand_streams_of_batches_give_the_same_store_as_their_steps(**drawn):
    check_batches(**drawn)


def check_batches(layout, num_envs, length, sizes, ids, sampler, seed, end_rate):
    spaces, stack = SPACES[layout]
    make_sampler = samplers()[sampler]
    whole, single = (make(layout, num_envs, length, sampler=make_sampler(), n_step=2, gamma=0.9) for _ in range(2))
    store, stream = NaiveStore(num_envs, length), Stream(seed, num_envs, spaces, stack, "same_step")
    stream.end_rate = end_rate
    for size in sizes:
        steps = [stream.step(ACTION) for _ in range(size)]
        for obs, action, step, active in steps:
            info = {k: nested(v) if k == "final_obs" else v for k, v in step.info.items()}
            given = step._replace(obs=nested(step.obs), info=info)
            single.extend(nested(obs), action, given, active, extras={"log_prob": step.reward * 2})
        whole.extend(batch_of(steps, store, ids=ids))
        assert whole.written.tolist() == single.written.tolist()
        assert whole.cuts == single.cuts
        if not len(single):
            continue
        ours, theirs = (buffer.get(buffer.indices()).clone() for buffer in (whole, single))
        check_batch(ours, store, 2, 0.9)
        for key in ours.keys(True, True):
            assert bits(ours[key]) == bits(theirs[key]), key
        try:
            drawn = single.sample(5).clone()
        except LifecycleError:
            with pytest.raises(LifecycleError):
                whole.sample(5)
            continue
        assert torch.equal(whole.sample(5)["index"], drawn["index"])


def boundaries(batch) -> torch.Tensor:
    return (batch["next", "done"] | batch["next", "cut"])[:, 0]


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("form", ["compact", "delta"])
@pytest.mark.parametrize("layout", sorted(SPACES))
def test_smaller_forms_are_exact_but_for_boundaries(layout, form, where, tmp_path):
    check_form(layout, form, 3, 12, (5, 1, 9, 4), 4, tmp_path / "store" if where == "disk" else None)


@pytest.mark.slow
@settings(deadline=None, max_examples=1000)
@given(
    layout=st.sampled_from(sorted(SPACES)),
    form=st.sampled_from(["compact", "delta"]),
    num_envs=st.integers(1, 4),
    length=st.integers(2, 14),
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
)
def test_a_thousand_streams_of_smaller_forms_are_exact_but_for_boundaries(**drawn):
    check_form(**drawn)


def check_form(layout, form, num_envs, length, sizes, seed, directory=None):
    spaces, stack = SPACES[layout]
    buffer = make(layout, num_envs, length, directory=directory)
    store, stream = NaiveStore(num_envs, length), Stream(seed, num_envs, spaces, stack, "same_step")
    for size in sizes:
        batch = batch_of([stream.step(ACTION) for _ in range(size)], store, ids=True)
        if form == "delta":
            batch = to_delta(batch)
        else:
            batch = batch.copy()
            batch["next"] = batch["next"].exclude("observation")
        buffer.extend(batch)
    if not len(buffer):
        return
    ours, index = buffer.get(buffer.indices()).clone(), store.index()
    assert boundaries(ours).any()
    for b, edge in enumerate(boundaries(ours).tolist()):
        e, place = index[int(ours["index"][b])]
        row = store.rows[e][place]
        assert int(ours["collector", "traj_ids"][b]) == row.trajectory
        assert edge == (row.terminated or row.truncated or row.cut or place + 1 == len(store.rows[e]))
        for name in spaces:
            key = ("observation", *filter(None, (name,)))
            following = ours[("next", *key)][b]
            assert bits(ours[key][b]) == bits(row.obs[name])
            if not edge:
                assert bits(following) == bits(row.next_obs[name])
            elif form == "compact":
                assert following.isnan().any(), "a boundary row"
            else:
                # float16 of a difference below 8: half a unit in the last place is at most 2⁻⁹
                assert torch.allclose(following, row.next_obs[name], atol=2**-8)


def test_pictures_in_compact_form_need_a_value_to_fill_in():
    buffer = ReplayBuffer(20, 2, ArraySpec((3,), torch.uint8), ArraySpec((), torch.int64))
    batch = TensorDict(
        {
            "observation": torch.arange(24, dtype=torch.uint8).view(2, 4, 3),
            "action": torch.zeros(2, 4, dtype=torch.int64),
            "next": {name: torch.zeros(2, 4, 1, dtype=torch.bool) for name in ("done", "terminated")}
            | {"reward": torch.zeros(2, 4, 1)},
        },
        [2, 4],
    )
    with pytest.raises(DtypeError, match="expected a whole number as fill_value"):
        buffer.extend(batch)
    assert len(buffer) == 0
    buffer.extend(batch, fill_value=7)
    following = buffer.get(buffer.indices())["next", "observation"]
    assert following[3].tolist() == following[7].tolist() == [7, 7, 7]
    assert following[0].tolist() == [3, 4, 5]


def test_batches_that_do_not_fit_are_refused_and_change_nothing():
    buffer = make("plain", 2, 8)
    store, stream = NaiveStore(2, 8), Stream(0, 2, *SPACES["plain"], "same_step")
    batch = batch_of([stream.step(ACTION) for _ in range(3)], store, ids=True)
    for broken, error, match in [
        (batch[:1], ShapeError, r"shape \(2, T\), environments first"),
        (batch.reshape(-1), ShapeError, r"got TensorDict \(6,\)"),
        (batch.exclude("action"), DataError, "expected action in the batch"),
        (batch.exclude("log_prob"), DataError, "expected log_prob in the batch"),
        (batch.clone().set("action", batch["action"].double()), DtypeError, "action: expected torch.float32"),
        (torch.zeros(2, 3), ShapeError, "or one TensorDict"),
    ]:
        with pytest.raises(error, match=match):
            buffer.extend(broken)
        assert len(buffer) == 0


def test_ids_that_contradict_the_observations_are_cut_and_counted():
    buffer = make("plain", 1, 20)
    obs = torch.arange(24.0).view(1, 6, 4)
    flag = torch.zeros(1, 6, 1, dtype=torch.bool)
    batch = TensorDict(
        {
            "observation": obs,
            "action": torch.zeros(1, 6, 2),
            "log_prob": torch.zeros(1, 6),
            "collector": {"traj_ids": torch.zeros(1, 6, dtype=torch.int64)},
            "next": {"observation": obs + 1, "reward": torch.zeros(1, 6, 1), "done": flag, "terminated": flag},
        },
        [1, 6],
    )
    buffer.extend(batch)
    assert buffer.cuts == 5
    assert torch.equal(buffer.get(buffer.indices())["next", "observation"], obs[0] + 1)


def test_a_batch_on_disk_counts_at_once(tmp_path):
    buffer = make("stack", 2, 6, directory=tmp_path)
    store, stream = NaiveStore(2, 6), Stream(1, 2, *SPACES["stack"], "same_step")
    stream.idle_rate = 0.0
    buffer.extend(batch_of([stream.step(ACTION) for _ in range(17)], store, ids=True))
    assert buffer.store.record.sequence == 1
    check_batch(buffer.get(buffer.indices()), store, 1, 0.99)
    assert np.all(buffer.written.numpy() == 17)
