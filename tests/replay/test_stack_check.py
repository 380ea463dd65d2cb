"""Stacks that a store could not give back are refused, by whichever way they come."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_reference import NaiveStore, Stream, check_batch
from tensordict import TensorDict

from headrace.errors import ConfigError, ShapeError
from headrace.replay import ArraySpec, ReplayBuffer
from headrace.types import StackSpec, Step

N, K, SIDE = 3, 4, 8
ACTION = ArraySpec((1,), torch.float32)


def stacks(steps: int, order: str, seed: int = 0) -> torch.Tensor:
    """Observations (steps + 1, N, K, SIDE, SIDE) of frames that are all different."""
    frames = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (steps + 2 * K, N, SIDE, SIDE)))
    hop = 2 if order == "dilated" else 1
    picked = [torch.stack([frames[t + hop * k] for k in range(K)], 1) for t in range(steps + 1)]
    if order == "newest first":
        picked = [stack.flip(1) for stack in picked]
    return torch.stack(picked).to(torch.uint8)


def make(stack: StackSpec, shape: tuple[int, ...], **settings) -> ReplayBuffer:
    return ReplayBuffer(40 * N, N, ArraySpec(shape, torch.uint8), ACTION, stack=stack, **settings)


def feed(buffer: ReplayBuffer, observed: torch.Tensor, form: str) -> None:
    no, steps = torch.zeros(N, dtype=torch.bool), len(observed) - 1
    if form == "steps":
        for t in range(steps):
            step = Step(observed[t + 1].contiguous(), torch.zeros(N), no, no, {})
            buffer.extend(observed[t].contiguous(), torch.zeros(N, 1), step)
        return
    following = {name: torch.zeros(N, steps, 1, dtype=torch.bool) for name in ("done", "terminated")}
    following["reward"] = torch.zeros(N, steps, 1)
    if form == "batch":
        following["observation"] = observed[1:].transpose(0, 1)
    batch = {"observation": observed[:-1].transpose(0, 1), "action": torch.zeros(N, steps, 1), "next": following}
    buffer.extend(TensorDict(batch, [N, steps]), fill_value=0)


@pytest.mark.parametrize("form", ["steps", "batch", "compact"])
@pytest.mark.parametrize("order", ["oldest first", "newest first", "dilated"])
@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_only_the_declared_axis_and_order_are_taken(layout, order, form) -> None:
    observed = stacks(12, order)
    if layout == "channels last":
        observed = observed.movedim(2, -1)
    shape, axis = tuple(observed.shape[2:]), 0 if layout == "channels first" else 2
    for dim in range(3):
        buffer = make(StackSpec(frames=K, dim=dim), shape)
        if order == "oldest first" and dim == axis:
            feed(buffer, observed, form)
            got = buffer.get(buffer.indices())
            assert torch.equal(got["observation"], observed[:-1].transpose(0, 1).flatten(0, 1))
            continue
        with pytest.raises(ShapeError, match=f"expected 4 frames on axis {dim} of") as refused:
            feed(buffer, observed, form)
        assert len(buffer) == 0, "nothing was stored"
        if order == "oldest first":
            assert f"StackSpec(frames=4, dim={axis}, layout='concat')" in str(refused.value)
        if order == "newest first":
            assert f"frames on axis {axis} from newest to oldest" in str(refused.value)


def test_a_stack_that_changes_late_is_found_soon() -> None:
    buffer = make(StackSpec(frames=K, dim=0), (K, SIDE, SIDE))
    feed(buffer, stacks(150, "oldest first"), "steps")
    # one frame of one environment per write: all of them within N · (K − 1) writes
    with pytest.raises(ShapeError, match="oldest to newest"):
        feed(buffer, stacks(N * (K - 1), "newest first", seed=1), "steps")


@pytest.mark.parametrize("env", range(2))
def test_stacks_that_change_late_in_one_of_two_environments_are_found(env: int) -> None:
    buffer = ReplayBuffer(80, 2, ArraySpec((K, SIDE, SIDE), torch.uint8), ACTION, stack=StackSpec(frames=K, dim=0))
    right, wrong, no = stacks(150, "oldest first")[:, :2], stacks(20, "oldest first", 1)[:, :2], torch.zeros(2).bool()
    wrong[:, env] = wrong[:, env].flip(1)

    def write(observed: torch.Tensor) -> None:
        for t in range(len(observed) - 1):
            step = Step(observed[t + 1].contiguous(), torch.zeros(2), no, no, {})
            buffer.extend(observed[t].contiguous(), torch.zeros(2, 1), step)

    write(right)
    with pytest.raises(ShapeError, match=f"environment {env}: expected 4 frames"):
        write(wrong)


def test_last_observations_of_episodes_are_compared_too() -> None:
    observed = stacks(1, "oldest first")
    buffer = make(StackSpec(frames=K, dim=0), (K, SIDE, SIDE))
    yes = torch.ones(N, dtype=torch.bool)
    info = {"final_obs": observed[1].flip(1).contiguous(), "_final_obs": yes}
    with pytest.raises(ShapeError, match="oldest to newest"):
        buffer.extend(observed[0].contiguous(), torch.zeros(N, 1), Step(observed[1], torch.zeros(N), yes, ~yes, info))


def fits(spec: StackSpec, shape: tuple[int, ...]) -> bool:
    try:
        spec.frame_shape(shape)
    except (ShapeError, ConfigError):
        return False
    return True


@st.composite
def disagreements(draw):
    """How stacks are made, their shape and dtype, and how a caller says that they are made."""
    frame = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    layout = draw(st.sampled_from(["concat", "new_axis"]))
    dim = draw(st.integers(0, len(frame) - (layout == "concat")))
    true = StackSpec(frames=draw(st.integers(2, 4)), dim=dim, layout=layout)
    shape = true.stacked_shape(frame)
    every = itertools.product(range(2, 5), range(len(shape)), ("concat", "new_axis"), ("repeat", "zero"))
    said = (StackSpec(frames=k, dim=d, layout=where, reset=reset) for k, d, where, reset in every)
    return (
        true,
        ArraySpec(shape, draw(st.sampled_from([torch.uint8, torch.float32]))),
        draw(st.sampled_from([spec for spec in said if fits(spec, shape)])),
    )


DRAWN = given(case=disagreements(), num_envs=st.integers(1, 3), steps=st.integers(1, 25), seed=st.integers(0, 10_000))


def check_said(case: tuple[StackSpec, ArraySpec, StackSpec], num_envs: int, steps: int, seed: int) -> bool:
    """Return whether the caller's stack was refused; whatever was stored before comes back bit for bit."""
    true, space, said = case
    stream, refused = Stream(seed, num_envs, {"": space}, {"": true}, "same_step"), False
    buffer = ReplayBuffer(30 * num_envs, num_envs, space, ACTION, stack=said)
    store = NaiveStore(num_envs, 30)
    for _ in range(steps):
        obs, action, step, active = stream.step(ACTION)
        info = {name: value[""] if name == "final_obs" else value for name, value in step.info.items()}
        try:
            buffer.extend(obs[""], action, step._replace(obs=step.obs[""], info=info), active)
        except ShapeError:
            refused = True
            break
        store.extend(obs, action, step, active, "same_step")
    if len(buffer):
        check_batch(buffer.get(buffer.indices()), store, 1, 0.99)
    return refused


@pytest.mark.filterwarnings("ignore:ReplayBuffer.*did not go on")
@settings(deadline=None, max_examples=100)
@DRAWN
def test_a_stack_is_refused_or_comes_back_bit_for_bit(**drawn) -> None:
    check_said(**drawn)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ReplayBuffer.*did not go on")
def test_thousands_of_stacks_are_refused_or_come_back_bit_for_bit() -> None:
    found: list[bool] = []

    @settings(deadline=None, max_examples=2500, database=None)
    @DRAWN
    def check(**drawn) -> None:
        found.append(check_said(**drawn))

    check()
    print(f"{len(found)} streams, {sum(found)} of them refused")
    assert sum(found) > 500
