"""A step does nothing in Python per environment, and checks ids once."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch

import headrace
from headrace import ids
from headrace.envs.batch_env import BatchEnv

FALLEN = torch.tensor([0, 3])


def _calls(function: Callable[[], object]) -> int:
    """How many functions, of Python and of C, are called."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()  # what other tests left would be finalized meanwhile, and counted
    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def _counts(task: str, num_envs: int) -> dict[str, int]:
    """Calls of each kind of step and reset, once they have been made before."""
    env: BatchEnv = headrace.make(task, num_envs, seed=0, threads=1)
    env.reset()
    actions = torch.zeros((num_envs, *env.single_action_space.shape))
    mask = torch.zeros(num_envs, dtype=torch.bool)
    mask[FALLEN] = True

    def fall() -> None:
        positions = env.sim.field("qpos")
        positions[FALLEN, 1 if "pendulum" in task or "cartpole" in task else 2] = 50.0

    def with_ends() -> object:
        step = env.step(actions)
        assert step.info["ends"].env_ids.tolist() == FALLEN.tolist()
        return step

    found: dict[str, int] = {}
    for name, prepare, call in (
        ("step", lambda: None, lambda: env.step(actions)),
        ("ends", fall, with_ends),
        ("suspended", lambda: env.suspend(FALLEN), lambda: env.step(actions)),
        ("reset of two", lambda: env.resume(FALLEN), lambda: env.reset(options={"reset_mask": mask})),
    ):
        for _ in range(3):
            prepare()
            found[name] = _calls(call)
    env.close()
    return found


@pytest.mark.parametrize("task", ["inverted-pendulum", "ant", "humanoid", "cartpole"])
def test_the_number_of_calls_in_a_step_does_not_depend_on_the_number_of_environments(task: str) -> None:
    few, many = _counts(task, 8), _counts(task, 64)
    assert few == many
    # what a step costs besides the physics is these calls
    assert few["step"] <= 200, few
    assert few["ends"] <= 360, few
    assert few["reset of two"] <= 190, few


@pytest.mark.parametrize("task", ["ant", "cartpole-camera"])
def test_ids_and_masks_are_checked_once_per_call(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []
    for name in ("_check_indices", "_check_mask"):
        checked = getattr(ids, name)
        monkeypatch.setattr(ids, name, lambda *a, _f=checked, _n=name: checks.append(_n) or _f(*a))
    env = headrace.make(task, 6, seed=0, threads=1, overrides={"episode_length": 2})
    actions = torch.zeros((6, *env.single_action_space.shape))
    mask = torch.arange(6) < 3
    env.reset()
    for name, call, expected in (
        ("suspend", lambda: env.suspend([1]), 1),
        ("resume", lambda: env.resume([1]), 1),
        ("step", lambda: env.step(actions), 0),
        ("a step with ends", lambda: env.step(actions), 0),
        ("a step that says who is read", lambda: env.step(actions, observe=mask), 1),
        ("reset of some", lambda: env.reset(options={"reset_mask": mask}), 1),
        ("observe", lambda: env.observe([4, 2]), 1),
    ):
        checks.clear()
        call()
        assert len(checks) == expected, (name, checks)
    env.close()
