"""The rollout buffer against plain lists of what it was given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_reference import Stream

from headrace.errors import ConfigError, LifecycleError, ShapeError
from headrace.replay import ArraySpec, RolloutBuffer
from headrace.types import StackSpec

ACTION = ArraySpec((2,), torch.float32)


@settings(deadline=None, max_examples=60)
@given(
    steps=st.integers(1, 12),
    num_envs=st.integers(1, 4),
    frames=st.integers(1, 4),
    reset=st.sampled_from(["repeat", "zero"]),
    dim=st.sampled_from([0, 1]),
    autoreset=st.sampled_from(["same_step", "disabled"]),
    seed=st.integers(0, 10_000),
)
def test_rollouts_in_a_row_give_back_what_they_were_given(steps, num_envs, frames, reset, dim, autoreset, seed):
    stack = {"cam": StackSpec(frames=frames, dim=dim, reset=reset)}
    spaces = {
        "cam": ArraySpec(stack["cam"].stacked_shape((2, 3)), torch.uint8),
        "policy": ArraySpec((3,), torch.float32),
    }
    stream = Stream(seed, num_envs, spaces, stack, autoreset)
    extras = {"log_prob": ArraySpec((), torch.float32)}
    buffer = RolloutBuffer(steps, num_envs, spaces, ACTION, stack=stack, extras=extras, autoreset=autoreset)
    for _ in range(3):
        given_ = []
        for _ in range(steps):
            obs, action, step, active = stream.step(ACTION)
            log_prob = torch.rand(num_envs)
            buffer.extend(obs, action, step, active, {"log_prob": log_prob})
            given_.append((obs, action, step, torch.ones(num_envs).bool() if active is None else active, log_prob))
        check(buffer, given_, autoreset)
        buffer.clear()


def check(buffer, given_, autoreset):
    rollout = buffer.rollout()
    finals = {(int(t), int(e)): k for k, (t, e) in enumerate(zip(rollout.final_step, rollout.final_env, strict=True))}
    last_of = {}
    expected_ends = set()
    for t, (obs, action, step, active, log_prob) in enumerate(given_):
        assert torch.equal(rollout.active[t], active)
        for e in active.nonzero().flatten().tolist():
            following = step.obs
            done = bool(step.terminated[e] | step.truncated[e])
            if done and autoreset == "same_step":
                following = step.info["final_obs"]
            if e in last_of:
                before, at = last_of[e]
                assert bool(rollout.cut[at, e]) == (
                    before is not None and any(not torch.equal(before[name][e], obs[name][e]) for name in obs)
                )
                if rollout.cut[at, e]:
                    expected_ends.add((at, e))
            last_of[e] = (None if done else following, t)
            if done:
                expected_ends.add((t, e))
            for name in obs:
                assert torch.equal(rollout.obs[name][t, e], obs[name][e])
                if (t, e) in finals:
                    assert torch.equal(rollout.final_obs[name][finals[t, e]], following[name][e])
            assert torch.equal(rollout.action[t, e], action[e])
            assert rollout.reward[t, e] == step.reward[e]
            assert rollout.terminated[t, e] == step.terminated[e]
            assert rollout.truncated[t, e] == step.truncated[e]
            assert rollout.extras["log_prob"][t, e] == log_prob[e]
    backwards = torch.arange(rollout.active.shape[1] - 1, -1, -2)
    for name, part in buffer.observations(backwards).items():
        assert torch.equal(part, rollout.obs[name][:, backwards])
    assert buffer.rollout(observations=False).obs == {}
    assert set(finals) == expected_ends
    for e, (following, t) in last_of.items():
        assert not rollout.cut[t, e]
        if following is not None:
            for name in following:
                assert torch.equal(rollout.last_obs[name][e], following[name][e])
    acted = int(rollout.active.sum())
    if not acted:
        return
    count = min(3, acted)
    batches = list(buffer.minibatches(count, seed=1, epoch=2))
    places = torch.cat([batch["place"] for batch in batches])
    assert sorted(places.tolist()) == rollout.active.flatten().nonzero().flatten().tolist()
    for batch in batches:
        place = batch["place"]
        assert torch.equal(batch["action"], rollout.action.flatten(0, 1)[place])
        assert torch.equal(batch["log_prob"], rollout.extras["log_prob"].flatten()[place])
        for name in rollout.obs:
            assert torch.equal(batch["observation", name], rollout.obs[name].flatten(0, 1)[place])


def test_a_full_buffer_and_wrong_extras_are_refused():
    spaces = {"policy": ArraySpec((3,), torch.float32)}
    buffer = RolloutBuffer(1, 2, spaces, ACTION, extras={"value": ArraySpec((), torch.float32)})
    with pytest.raises(ConfigError, match="extras: action"):
        RolloutBuffer(1, 2, spaces, ACTION, extras={"action": ArraySpec((), torch.float32)})
    stream = Stream(0, 2, spaces, {}, "same_step")
    obs, action, step, active = stream.step(ACTION)
    with pytest.raises(ShapeError, match="extras"):
        buffer.extend(obs, action, step, active)
    with pytest.raises(ShapeError, match="value"):
        buffer.extend(obs, action, step, active, {"value": torch.zeros(3)})
    buffer.extend(obs, action, step, active, {"value": torch.zeros(2)})
    assert buffer.full
    with pytest.raises(LifecycleError, match="clear"):
        buffer.extend(obs, action, step, active, {"value": torch.zeros(2)})
    with pytest.raises(ShapeError, match="count"):
        next(buffer.minibatches(9, seed=0))


def test_a_stack_of_another_order_is_refused():
    stack = StackSpec(frames=3, dim=0)
    spaces = {"": ArraySpec((3, 2, 2), torch.uint8)}
    stream = Stream(3, 2, spaces, {"": stack}, "disabled")
    buffer = RolloutBuffer(4, 2, spaces[""], ACTION, stack=stack, autoreset="disabled")
    obs, action, step, active = stream.step(ACTION)
    with pytest.raises(ShapeError, match="from newest to oldest"):
        buffer.extend(obs[""].flip(1), action, step._replace(obs=step.obs[""].flip(1)), active)


def test_frames_are_kept_once():
    stack = StackSpec(frames=4, dim=0)
    buffer = RolloutBuffer(128, 8, ArraySpec((4, 84, 84), torch.uint8), ArraySpec((), torch.int64), stack=stack)
    # 128 transitions, three frames of history, the one that follows, one in progress
    assert buffer.nbytes < 8 * (128 + 5) * (7056 + 17) + 128 * 8 * 40
