"""Chunk policies, engines, samplers and rollout buffers with an environment on the pretend CUDA device."""

from __future__ import annotations

import pytest
import torch

import headrace
from flat import evaluate
from headrace import load_policy, replay
from headrace.evaluation import Evaluation
from headrace.replay import ReplayBuffer, RolloutBuffer
from pretend_cuda import pretend_cuda


def test_a_shipped_policy_loads_onto_the_device_and_plans_what_it_plans_on_the_cpu() -> None:
    rows = torch.linspace(-1, 1, 5 * 23).view(5, 23)
    expected = load_policy("pusher-solid")({"policy": rows})
    with pretend_cuda() as device, torch.no_grad():
        policy = load_policy("pusher-solid", device="cuda")
        assert {parameter.device.type for parameter in [*policy.parameters(), *policy.buffers()]} == {"cuda"}
        given = rows.to("cuda")
        device.clear()
        chunk = policy({"policy": given})
        assert chunk.is_cuda
        assert device.waits == 0, (device.syncs, device.to_host, device.blocking)
        assert torch.allclose(chunk.cpu(), expected, atol=1e-5)


def play(device: str, engine: str) -> Evaluation:
    overrides = {"episode_length": 12}
    env = headrace.make("pusher-solid", 3, device=device, sim="warp", autoreset="disabled", overrides=overrides)
    # a process of its own has no pretend device
    policy = load_policy("pusher-solid", device="cpu" if engine == "process" else device)
    result = evaluate(env, policy, episodes=5, execute=4, engine=engine, progress=False)
    env.close()
    return result


# the pretend device belongs to one thread: an engine in another is not shown
@pytest.mark.parametrize("engine", ["inline", "process"])
def test_engines_play_an_environment_on_the_device(engine: str) -> None:
    expected = play("cpu", "inline")
    with pretend_cuda(warp=True):
        got = play("cuda", engine)
    for ours, theirs in zip(got.episodes, expected.episodes, strict=True):
        assert (ours.episode_id, ours.length, ours.success) == (theirs.episode_id, theirs.length, theirs.success)
        assert ours.reward == pytest.approx(theirs.reward, abs=1e-3)


SAMPLERS = {
    "uniform": lambda: replay.UniformSampler(),
    "without replacement": lambda: replay.SamplerWithoutReplacement(),
    "prioritized": lambda: replay.PrioritizedSampler(),
    "slices": lambda: replay.SliceSampler(3),
    "prioritized slices": lambda: replay.PrioritizedSampler(3),
    "trajectories": lambda: replay.TrajectorySampler(),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_gives_batches_on_the_device_that_are_those_of_the_cpu(name: str) -> None:
    def sample(device: str) -> dict[str, torch.Tensor]:
        env = headrace.make("cartpole", 3, device=device, sim="warp", overrides={"episode_length": 5})
        spaces = env.single_observation_space, env.single_action_space
        buffer = ReplayBuffer(60, 3, *spaces, sampler=SAMPLERS[name](), device=device)
        obs, _ = env.reset(seed=0)
        for index in range(14):
            action = torch.full((3, 1), 0.1 * index, device=device)
            if index == 6:
                env.suspend([1])
            step = env.step(action)
            buffer.extend(obs, action, step, active=env.active)
            obs = step.obs
        batch = buffer.sample(2)
        found = {str(key): batch[key] for key in batch.keys(include_nested=True, leaves_only=True)}
        assert {values.device.type for values in found.values()} == {device}
        return {key: values.cpu() for key, values in found.items()}

    expected = sample("cpu")
    with pretend_cuda(warp=True):
        got = sample("cuda")
    assert got.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.equal(got[key], values), key


def test_a_rollout_buffer_takes_steps_of_the_device() -> None:
    def collect(device: str) -> dict[str, torch.Tensor]:
        env = headrace.make("cartpole", 3, device=device, sim="warp", overrides={"episode_length": 5})
        buffer = RolloutBuffer(6, 3, env.single_observation_space, env.single_action_space)
        obs, _ = env.reset(seed=0)
        for index in range(6):
            action = torch.full((3, 1), 0.1 * index, device=device)
            step = env.step(action)
            buffer.extend(obs, action, step)
            obs = step.obs
        batch = next(iter(buffer.minibatches(1, seed=0)))
        return {str(key): batch[key].cpu() for key in batch.keys(include_nested=True, leaves_only=True)}

    expected = collect("cpu")
    with pretend_cuda(warp=True):
        got = collect("cuda")
    assert got.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.equal(got[key], values), key
