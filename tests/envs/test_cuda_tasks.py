"""Every task on the pretend CUDA device: it runs, or is refused in words; waits, copies and graphs per step."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

import headrace
from headrace import BatchEnv, task_names
from headrace.envs.registry import make_task
from headrace.errors import ConfigError
from headrace.sim import CameraSpec
from headrace.sim.camera.camera import PoseReader
from headrace.sim.camera.warp_camera import WarpCamera
from headrace.sim.warp_sim import MujocoWarpSim
from pretend_cuda import PretendCuda, pretend_cuda

N = 4
REFUSED = {
    "humanoid": "got PGS, which MuJoCo Warp does not have",
    **{name: "reads contacts of the state after a step" for name in task_names() if name.startswith("aloha")},
}
ALLOWED = [name for name in task_names() if name not in REFUSED]
CAMERAS = [name for name in ALLOWED if make_task(name).images]


@pytest.fixture
def device() -> Generator[PretendCuda]:
    with pretend_cuda(warp=True) as made:
        yield made


def make(task: str, device: str = "cuda", **settings: object) -> BatchEnv:
    overrides: dict[str, object] = {"episode_length": 5}
    if task in CAMERAS and device == "cpu":
        (group,) = make_task(task).images
        overrides[f"images.{group}.renderer" if task.endswith("-terms") else "renderer"] = "warp"
    env = headrace.make(task, N, device=device, sim="warp", overrides=overrides, **settings)
    env.reset(seed=0)
    return env


def act(env: BatchEnv, index: int = 0) -> torch.Tensor:
    shape = env.action_space.shape
    if len(shape) == 1:
        return torch.full(shape, index % 2, dtype=torch.int64, device=env.device)
    return torch.full(shape, 0.1 * (index % 5), dtype=torch.float32, device=env.device)


@pytest.mark.parametrize("task", sorted(REFUSED))
def test_a_task_that_mujoco_warp_cannot_step_is_refused_with_the_reason(device: PretendCuda, task: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[task]) as refusal:
        headrace.make(task, N, device="cuda", sim="warp")
    assert 'sim="mujoco"' in str(refusal.value)


@pytest.mark.parametrize("task", ALLOWED)
def test_a_step_waits_once_and_copies_one_byte_per_environment_down(device: PretendCuda, task: str) -> None:
    env = make(task)
    camera = task in CAMERAS
    for _ in range(6):
        env.step(act(env))
    ended = 0
    for index in range(10):
        if index == 5:
            env.suspend([1])
            env.step(act(env))
        actions = act(env, index)
        device.clear()
        step = env.step(actions)
        begins = "ends" in step.info
        ended += begins
        # the words of an instruction are read on the host when an episode begins
        words = begins and task == "pusher-words"
        assert device.waits == 1 + words, (device.syncs, device.to_host, device.blocking)
        assert device.to_host.total() == 1 + words
        # physics; reset and forward; each look of a camera
        assert device.launches["graph"] == 1 + 2 * begins + camera * (1 + begins)
        # the others write frames into stacks, and stacks into observations
        assert device.launches.total() == device.launches["graph"] or camera
        assert device.to_device.total() == (2 if begins else 0) or camera
        assert not device.blocking
        assert not device.off_stream
    assert ended >= 2
    env.close()


@pytest.mark.parametrize("task", ALLOWED)
def test_the_numbers_are_those_of_warp_on_the_cpu(task: str) -> None:
    def play(device: str) -> list[torch.Tensor]:
        env = make(task, device)
        seen: list[torch.Tensor] = []
        for index in range(7):
            env.suspend([index % N])
            observe = torch.arange(N) != (index + 2) % N
            step = env.step(act(env, index), observe=observe.to(device))
            env.resume([index % N])
            seen += [values.cpu() for values in (*step.obs.values(), step.reward, step.terminated, step.truncated)]
            assert {values.device.type for values in step.obs.values()} == {device}
            if "final_obs" in step.info:
                seen += [values.cpu() for values in step.info["final_obs"].values()]
        state = env.state_dict()
        env.step(act(env))
        env.load_state_dict(state)
        seen += [values.cpu() for values in env.observe([2, 0]).values()]
        env.close()
        return seen

    expected = play("cpu")
    with pretend_cuda(warp=True):
        got = play("cuda")
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours.double(), theirs.double(), rtol=1e-5, atol=1e-5)  # sums are taken in another order


def test_the_functions_of_the_refused_humanoid_run_there_with_a_solver_that_warp_has(device: PretendCuda) -> None:
    task = make_task("humanoid")
    task.model.opt.solver = 2  # Newton
    sim = MujocoWarpSim(task.model, 2, device="cuda")
    env = BatchEnv(task, sim)
    env.reset(seed=0)
    actions = torch.zeros(2, 17, device="cuda")
    env.step(actions)
    device.clear()
    step = env.step(actions)
    assert device.waits == 1
    assert torch.isfinite(step.obs["policy"].cpu()).all()
    env.close()


@pytest.mark.parametrize("task", CAMERAS)
def test_whose_camera_is_read_costs_one_more_wait_where_the_mask_is_on_the_device(
    device: PretendCuda, task: str
) -> None:
    env = make(task)
    wanted = torch.arange(N, device="cuda") < 2
    for _ in range(2):
        env.step(act(env), observe=wanted)
    actions, before = act(env), env.frames_drawn
    device.clear()
    step = env.step(actions, observe=wanted)
    assert device.waits == 2, (device.syncs, device.to_host, device.blocking)
    assert env.frames_drawn - before == 2
    assert step.info["observed"].cpu().tolist() == [True, True, False, False]


def test_looks_are_refused_on_a_gpu_and_native_draws_them_on_the_host(device: PretendCuda) -> None:
    settings = {"looks.color": 0.2}
    with pytest.raises(ConfigError, match="renderer='native', which draws on the host"):
        headrace.make("cartpole-camera", N, device="cuda", sim="warp", overrides=settings)
    env = headrace.make("cartpole-camera", N, device="cuda", sim="warp", overrides=settings | {"renderer": "native"})
    env.reset(seed=0)
    env.step(act(env))
    actions = act(env)
    device.clear()
    step = env.step(actions)
    assert step.obs["policy"].is_cuda
    # the flags, the poses and which episodes' looks come down; frames and their environments go up
    assert (device.waits, device.to_host.total(), device.to_device.total()) == (3, 3, 2)
    env.close()


@pytest.mark.parametrize("kind", ["rgb", "gray", "depth", "segmentation"])
def test_a_frame_drawn_from_positions_on_the_device_is_that_of_poses_from_the_host(kind: str) -> None:
    task = make_task("cartpole-camera")
    spec = CameraSpec(name="side", width=32, height=24, data_types=(kind,))
    camera = WarpCamera(task.model, spec, device="cpu")
    qpos = torch.linspace(-0.5, 0.5, 2 * task.model.nq, dtype=torch.float64).view(2, -1).repeat(3, 1)[:5]
    none = torch.empty(5, 0, 3, dtype=torch.float64), torch.empty(5, 0, 4, dtype=torch.float64)
    expected = torch.from_numpy(getattr(camera.render(PoseReader(task.model).read(qpos.numpy())), kind).copy())
    for rows in (5, 3, 1, 5):
        found = camera.draw(qpos[:rows], *(part[:rows] for part in none))[kind]
        assert found.dtype == expected.dtype
        assert found.shape == expected[:rows].shape
        # float32 kinematics may move an edge by a pixel
        differs = (found.double() - expected[:rows].double()).abs() > (1e-3 if kind == "depth" else 0)
        assert differs.flatten(1).double().mean() < 0.01
    assert camera.draw(qpos[:0], *(part[:0] for part in none))[kind].shape[0] == 0
