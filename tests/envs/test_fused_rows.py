"""What a step does in one pass on the CPU, against its references in torch operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace
from headrace.envs._observations import HeldObservations
from headrace.envs.task import select_actions
from headrace.errors import ActionError

N = 6
BAD = (float("nan"), float("inf"), -float("inf"), 1e39, -1e300)


@pytest.fixture(scope="module")
def env() -> headrace.BatchEnv:
    env = headrace.make("humanoid", N, threads=1)
    env.reset()
    return env


def _held(env: headrace.BatchEnv) -> HeldObservations:
    groups = {"policy": spaces.Box(-1, 1, (3,), np.float32), "critic": spaces.Box(-1, 1, (2,), np.float32)}
    board = HeldObservations(spaces.Dict(groups), {}, env.sim, 1)
    everyone = torch.arange(N)
    board.show(everyone, {"policy": torch.full((N, 3), 7.0).double(), "critic": torch.full((N, 2), 8.0).double()})
    return board


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_rows_are_posted_as_in_plain_torch(env: headrace.BatchEnv, data: st.DataObject) -> None:
    ids = torch.tensor(sorted(data.draw(st.sets(st.integers(0, N - 1), min_size=1))))
    rows = len(ids)
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    obs = {
        "policy": torch.rand((rows, 3), generator=draw, dtype=torch.float64),
        # not contiguous
        "critic": torch.rand((2, rows), generator=draw, dtype=torch.float64).T,
    }
    reward = torch.rand(rows, generator=draw, dtype=torch.float64)
    for where in data.draw(st.lists(st.sampled_from([obs["policy"], obs["critic"], reward]), max_size=3)):
        where[data.draw(st.integers(0, rows - 1))] = data.draw(st.sampled_from(BAD))
    failed = (torch.rand(rows, generator=draw) < 0.3) if data.draw(st.booleans()) else None

    fused, plain = _held(env), _held(env)
    plain._arrays = {}  # as on another device
    got, expected = fused.post(ids, obs, reward, failed), plain.post(ids, obs, reward, failed)
    assert (got is None) == (expected is None)
    if got is not None and expected is not None:
        assert torch.equal(got, expected)
    for name, values in plain.rows().items():
        assert torch.equal(fused.rows()[name], values), name


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_actions_are_taken_as_in_plain_torch(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(3,), (2, 3), (0,)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    space = spaces.Box(-1, 1, shape, np.float32)
    actions = torch.rand((N, *shape), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    actions = actions.to(dtype)
    ids = torch.tensor(sorted(data.draw(st.sets(st.integers(0, N - 1)))), dtype=torch.int64)
    resting = [i for i in range(N) if i not in ids.tolist()]
    actions[resting] = float("nan")
    given, chosen = select_actions(actions, space, ids, torch.arange(N))
    assert given.data_ptr() == actions.data_ptr()
    assert torch.equal(chosen, actions[ids].double())
    if len(ids) and actions.numel():
        actions[int(ids[-1])] = data.draw(st.sampled_from([float("nan"), float("inf")]))
        with pytest.raises(ActionError, match=f"environment {int(ids[-1])} "):
            select_actions(actions, space, ids, torch.arange(N))


@pytest.mark.parametrize("ids", [None, [0, 2, 5], [4]])
def test_joined_fields_are_those_side_by_side(env: headrace.BatchEnv, ids: list[int] | None) -> None:
    rows = env.rows(ids)
    parts = [rows.get("qpos")[:, 2:], rows.get("cinert")[:, 1:].flatten(1), rows.get("qvel")]
    joined = rows.join(("qpos", slice(2, None)), ("cinert", slice(1, None)), "qvel")
    assert torch.equal(joined, torch.cat(parts, dim=1))
    assert joined.is_contiguous()


@pytest.mark.parametrize("index", [None, 1, slice(1, 3), (2, 0)])
def test_rows_are_contiguous_and_those_of_the_field(env: headrace.BatchEnv, index: object) -> None:
    ids = torch.tensor([1, 3, 4])
    field = env.sim.field("xipos")
    part = field if index is None else field[:, list(index) if isinstance(index, tuple) else index]
    for rows, expected in ((None, part), (ids, part[ids])):
        got = env.rows(rows).get("xipos", index)
        assert got.is_contiguous()
        assert torch.equal(got, expected)


@pytest.mark.parametrize("task", ["inverted-pendulum", "ant", "humanoid"])
def test_a_few_simulations_are_derived_as_many_are(task: str) -> None:
    few, many = headrace.make(task, 9, threads=2), headrace.make(task, 9, threads=2)
    for env in (few, many):
        env.reset(seed=3)
        for _ in range(3):
            env.step(torch.full(env.action_space.shape, 0.2))
    few.sim.forward(torch.tensor([2]))
    few.sim.forward(torch.tensor([3, 5, 6, 8]))
    many.sim.forward(torch.tensor([2, 3, 5, 6, 8]))
    assert torch.equal(few.sim.states(None), many.sim.states(None))
    for name in few.sim._fields:
        assert torch.equal(few.sim.field(name), many.sim.field(name)), name
