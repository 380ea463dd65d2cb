"""Environments on the pretend CUDA device: every tensor stays there, one wait per step, one stream."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch

import headrace
from headrace.envs.registry import make_task
from headrace.errors import ActionError, LifecycleError
from headrace.recording import EpisodeRecorder
from pretend_cuda import PretendCuda, _Stream, pretend_cuda

N = 4


@pytest.fixture
def device() -> Generator[PretendCuda]:
    with pretend_cuda(warp=True) as made:
        yield made


def zeros(env: headrace.BatchEnv) -> torch.Tensor:
    return torch.zeros(env.action_space.shape, device="cuda")


def make(task: str = "cartpole", **settings: object) -> headrace.BatchEnv:
    env = headrace.make(task, N, device="cuda", sim="warp", overrides={"episode_length": 5}, **settings)
    env.reset(seed=0)
    return env


def test_a_step_waits_once_for_the_device_also_where_episodes_end_and_begin(device: PretendCuda) -> None:
    env = make()
    for _ in range(6):  # graphs are captured, constants sent
        env.step(zeros(env))
    ended = 0
    for _ in range(10):
        actions = zeros(env)
        device.clear()
        step = env.step(actions)
        assert device.waits == 1, (device.syncs, device.to_host, device.blocking)
        # physics is one graph; ends add that of the reset and that of the forward
        ended += "ends" in step.info
        assert device.launches == {"graph": 3 if "ends" in step.info else 1}
        assert device.to_device.total() == (2 if "ends" in step.info else 0)  # which rows ended, pinned
    assert ended == 2


def test_a_step_of_a_subset_waits_once_and_replays_a_graph(device: PretendCuda) -> None:
    env = make()
    env.suspend([1])
    for _ in range(6):
        env.step(zeros(env))
    actions = zeros(env)
    device.clear()
    env.step(actions)
    assert device.waits == 1, (device.syncs, device.to_host, device.blocking)
    assert device.launches == {"graph": 1}


def test_ended_environments_are_parked_without_another_wait(device: PretendCuda) -> None:
    env = make(autoreset="disabled")
    for _ in range(4):
        env.step(zeros(env))
    actions = zeros(env)
    device.clear()
    assert env.step(actions).truncated.device.type == "cuda"
    assert device.waits == 1, (device.syncs, device.to_host, device.blocking)
    assert not env.active.cpu().any()


def test_every_launch_goes_to_the_stream_that_torch_is_on(device: PretendCuda) -> None:
    env = make()
    for handle in (0, 7):
        device.stream = _Stream(handle)
        device.clear()
        env.suspend([0])
        env.step(zeros(env))
        env.resume([0])
        env.reset(options={"reset_mask": torch.tensor([True, False, True, False])})
        assert device.launches["graph"] > 2
        assert not device.off_stream, device.off_stream


def test_the_numbers_are_those_of_the_cpu() -> None:
    def play(device: str) -> list[torch.Tensor]:
        env = headrace.make("cartpole", N, device=device, sim="warp", overrides={"episode_length": 5})
        seen = [env.reset(seed=3)[0]["policy"].cpu()]
        for index in range(7):
            env.suspend([index % N])
            step = env.step(torch.full((N, 1), 0.1 * index, device=device))
            env.resume([index % N])
            seen += [step.obs["policy"].cpu(), step.reward.cpu(), step.truncated.cpu()]
        env.close()
        return seen

    expected = play("cpu")
    with pretend_cuda(warp=True):
        got = play("cuda")
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_an_action_that_is_not_finite_is_refused_and_the_environments_must_be_reset(device: PretendCuda) -> None:
    env = make()
    actions = zeros(env)
    actions[2] = torch.nan
    with pytest.raises(ActionError, match=r"environment 2 .*found after the step: call reset\(\)"):
        env.step(actions)
    with pytest.raises(LifecycleError, match=r"call reset\(\)"):
        env.step(zeros(env))
    env.reset()
    env.suspend([2])
    assert torch.isfinite(env.step(actions).obs["policy"].cpu()).all()  # the row of a suspended one is not read


@pytest.mark.parametrize("task", ["cartpole-terms", "cartpole-discrete", "inverted-pendulum"])
def test_tasks_run_on_the_device(device: PretendCuda, task: str) -> None:
    env = make(task)
    actions = zeros(env) if env.action_space.shape[1:] else torch.zeros(N, dtype=torch.int64, device="cuda")
    for _ in range(6):
        step = env.step(actions)
    assert {values.device.type for values in step.obs.values()} == {"cuda"}
    assert make_task(task).observation_space.spaces.keys() == step.obs.keys()
    state = env.state_dict()
    env.load_state_dict(state)


def counted(device: PretendCuda, env: headrace.BatchEnv) -> list[int]:
    """Operations, launches of Warp, waits, copies down, bytes down, copies up, bytes up of the next step."""
    actions = zeros(env)
    device.clear()
    env.step(actions)
    down, up = device.to_host.total(), device.to_device.total()
    counts = [device.operations.total(), device.launches.total(), device.waits]
    return [*counts, down, device.bytes_to_host, up, device.bytes_to_device]


def count_steps(device: PretendCuda, task: str, **settings: object) -> dict[str, list[int]]:
    """The three kinds of steps of a task with episodes of five steps."""
    env = make(task, **settings)
    env.suspend([0, 1])
    for _ in range(6):  # graphs are captured, constants sent
        env.step(zeros(env))
    found = {f"{task}, half is suspended": counted(device, env)}
    env.reset(seed=0)
    env.resume([0, 1])
    for _ in range(6):
        env.step(zeros(env))
    found[f"{task}, all act"] = counted(device, env)
    for _ in range(2):
        env.step(zeros(env))
    found[f"{task}, all episodes end and begin"] = counted(device, env)
    env.close()
    return found


def test_the_table_of_the_docs_is_what_is_counted(device: PretendCuda, tmp_path: Path) -> None:
    found: dict[str, list[int]] = {}
    for task in ("cartpole", "ant", "cartpole-camera"):
        found |= count_steps(device, task)
    env = make()
    with EpisodeRecorder(tmp_path / "episodes") as recorder:
        env.attach(recorder)
        env.reset(seed=0)
        for _ in range(6):
            env.step(zeros(env))
        found["cartpole, all act and are recorded"] = counted(device, env)
    rows = [f"| {name} | {' | '.join(map(str, counts))} |" for name, counts in found.items()]
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text().splitlines()
    missing = [row for row in rows if row not in text]
    assert not missing, "docs/gpu.md: expected these rows in its table:\n" + "\n".join(missing)
