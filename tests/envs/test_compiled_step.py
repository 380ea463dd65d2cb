"""The compiled form of a task against its own row functions: the same environment, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import headrace
from headrace import errors
from headrace.envs.batch_env import BatchEnv
from headrace.envs.tasks.inverted_pendulum import InvertedPendulum, InvertedPendulumCfg
from headrace.testing._contract import require_same_tensors
from headrace.types import EpisodeEnds, Need, ResetRecord, Step, StepRecord

REACH = {"cartpole": 1.0, "inverted-pendulum": 3.0}
TASKS = sorted(REACH)


def pair(task: str, num_envs: int, **kwargs) -> tuple[BatchEnv, BatchEnv]:
    """The same environment twice: with kernels, and with the task's own functions."""
    fast, plain = (headrace.make(task, num_envs, threads=1, seed=3, **kwargs) for _ in range(2))
    assert fast._compiled is not None
    plain._compiled = None
    fast.reset()
    plain.reset()
    return fast, plain


def actions_for(env: BatchEnv, task: str, generator: torch.Generator) -> Tensor:
    shape = (env.num_envs, *(env.single_action_space.shape or ()))
    return (torch.rand(shape, generator=generator) * 2 - 1) * REACH[task]


def as_dict(step: Step) -> dict[str, object]:
    info: dict[str, object] = dict(step.info)
    ends = info.pop("ends", None)
    if isinstance(ends, EpisodeEnds):
        named = {f"ends.{name}": getattr(ends, name) for name in EpisodeEnds.__slots__}
        info |= {name: values for name, values in named.items() if values is not None}
    return {"obs": step.obs, "r": step.reward, "term": step.terminated, "trunc": step.truncated, "info": info}


def require_same_step(got: Step, expected: Step, when: str) -> None:
    one, other = as_dict(got), as_dict(expected)
    assert one["info"].keys() == other["info"].keys(), when  # type: ignore[attr-defined]
    require_same_tensors(one, other, when)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("num_envs", "kwargs"),
    [(1, {}), (7, {}), (7, {"autoreset": "disabled"}), (7, {"final_obs": False}), (40, {"episode_stride": 3})],
)
def test_steps_suspensions_and_resets_are_the_same(task, num_envs, kwargs) -> None:
    fast, plain = pair(task, num_envs, overrides={"episode_length": 23}, **kwargs)
    generator = torch.Generator().manual_seed(num_envs)
    ended = 0
    for at in range(60):
        if at % 7 == 3 and num_envs > 1:
            some = torch.rand(num_envs, generator=generator) < 0.5
            for env in (fast, plain):
                env.resume(env.suspended & ~env._active_set.parked)
                env.suspend(some)
        if at == 40:
            for env in (fast, plain):
                env.reset(options={"reset_mask": torch.arange(num_envs) % 2 == 0})
        if at % 10 == 9:
            few = torch.rand(num_envs, generator=generator) < 0.4
            options = {"reset_mask": few, "episode_ids": 1000 + torch.arange(int(few.sum())) * (at + 1)}
            require_same_tensors(fast.reset(options=options)[0], plain.reset(options=options)[0], f"reset {at}")
        actions = actions_for(fast, task, generator)
        actions = actions.double() if at % 5 == 0 else actions
        observe = torch.rand(num_envs, generator=generator) < 0.5 if at % 4 == 1 else None
        got, expected = fast.step(actions, observe=observe), plain.step(actions, observe=observe)
        require_same_step(got, expected, f"step {at}")
        ended += len(got.info["ends"]) if "ends" in got.info else 0
    assert ended > 0
    require_same_tensors(fast.state_dict(), plain.state_dict(), "state at the end")
    fast.close()
    plain.close()


@pytest.mark.parametrize("task", TASKS)
def test_a_broken_simulation_ends_its_episode_alike(task) -> None:
    fast, plain = pair(task, 5)
    generator = torch.Generator().manual_seed(0)
    for at in range(12):
        if at in (3, 8):
            for env in (fast, plain):
                env.sim.field("qvel")[at % 5] = torch.nan if at == 3 else 1e300
        actions = actions_for(fast, task, generator)
        require_same_step(fast.step(actions), plain.step(actions), f"step {at}")
    assert fast.divergences == plain.divergences >= 1
    fast.close()
    plain.close()


def test_what_a_step_returns_is_not_written_again() -> None:
    env, other = pair("inverted-pendulum", 6)
    generator = torch.Generator().manual_seed(1)
    kept: list[tuple[Step, dict[str, object]]] = []
    for _ in range(30):
        step = env.step(actions_for(env, "inverted-pendulum", generator))
        kept.append((step, copy.deepcopy(as_dict(step))))
    for step, then in kept:
        require_same_tensors(as_dict(step), then, "a step that was kept")
    env.close()
    other.close()


def test_masks_and_odd_actions_have_the_same_result() -> None:
    fast, plain = pair("cartpole", 4)
    generator = torch.Generator().manual_seed(2)
    everyone = torch.ones(4, dtype=torch.bool)
    for at in range(6):
        actions = actions_for(fast, "cartpole", generator)
        if at % 2:
            got = fast.step(actions, observe=everyone)
            expected = plain.step(actions, observe=everyone)
        else:
            odd = torch.empty(4, 2)[:, :1].copy_(actions)
            got, expected = fast.step(odd), plain.step(actions)
        require_same_step(got, expected, f"step {at}")
    before = fast.state_dict()
    with pytest.raises(errors.ActionError, match="nothing was stepped"):
        fast.step(torch.full((4, 1), torch.nan))
    with pytest.raises(errors.ShapeError):
        fast.step(torch.zeros(3, 1))
    require_same_tensors(fast.state_dict(), before, "state after bad actions")
    fast.close()
    plain.close()


class PaidInFull(InvertedPendulum):
    """Overrides a row function, and not the compiled form."""

    def reward(self, rows, actions):
        return super().reward(rows, actions) * 0.0 + 7.0


class ToldPendulum(InvertedPendulum):
    """A pendulum with kernels of its own and texts that name the episode."""

    def compiled(self, arrays):
        return super().compiled(arrays)

    def instructions(self, rows):
        return [f"balance {episode}" for episode in rows.episode_ids.tolist()]


def test_a_task_with_kernels_and_instructions_names_the_new_episode_after_an_autoreset() -> None:
    env = headrace.make(ToldPendulum(InvertedPendulumCfg(episode_length=3)), 2, threads=1)
    env.reset()
    assert env.instructions() == ("balance 0", "balance 1")
    for _ in range(3):
        env.step(torch.zeros(2, 1))
    assert env.instructions() == ("balance 2", "balance 3")


def test_a_subclass_with_a_function_of_its_own_is_not_stepped_by_its_parents_kernels() -> None:
    env = headrace.make(PaidInFull(InvertedPendulumCfg()), 2)
    env.reset()
    assert env._compiled is None
    assert env.step(torch.zeros(2, 1)).reward.tolist() == [7.0, 7.0]
    task = InvertedPendulum(InvertedPendulumCfg())
    task.terminated = lambda rows: torch.zeros(len(rows), dtype=torch.bool)  # type: ignore[method-assign]
    patched = headrace.make(task, 2)
    assert patched._compiled is None
    env.close()
    patched.close()
    late = headrace.make("cartpole", 2)
    late.reset()
    assert late._compiled is not None
    late.task.reward = lambda rows, actions: actions.sum(1) + 7.0  # type: ignore[method-assign]
    assert late.step(torch.zeros(2, 1)).reward.tolist() == [7.0, 7.0]
    late.close()


class Watcher:
    """Copies of everything that an observer is shown."""

    needs: frozenset[Need] = frozenset({"states"})

    def __init__(self) -> None:
        self.seen: list[dict[str, object]] = []

    def after_reset(self, record: ResetRecord) -> None:
        self._keep({name: getattr(record, name) for name in ("env_ids", "episode_ids", "obs", "states")})

    def after_step(self, record: StepRecord) -> None:
        plain = {name: getattr(record, name) for name in ("env_ids", "episode_ids", "actions", "states")}
        self._keep(plain | {"step": as_dict(record.step)})

    def _keep(self, record: dict[str, object]) -> None:
        self.seen.append(copy.deepcopy(record))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
def test_observers_are_shown_the_same_steps_and_beginnings(task, autoreset) -> None:
    fast, plain = pair(task, 6, overrides={"episode_length": 9}, autoreset=autoreset)
    watchers = Watcher(), Watcher()
    for env, watcher in zip((fast, plain), watchers, strict=True):
        env.attach(watcher)
        env.suspend([2])
        generator = torch.Generator().manual_seed(1)
        for at in range(30):
            if at == 14:
                env.reset(options={"reset_mask": torch.arange(6) % 2 == 0})
            env.step(actions_for(env, task, generator))
    got, expected = (watcher.seen for watcher in watchers)
    assert len(got) == len(expected) > 15
    for at, (one, other) in enumerate(zip(got, expected, strict=True)):
        require_same_tensors(one, other, f"record {at}")
    fast.close()
    plain.close()


def test_an_observer_that_raises_leaves_an_ended_episode_restarted_and_the_environment_usable() -> None:
    env, _ = pair("cartpole", 2, overrides={"episode_length": 3})

    class Raises(Watcher):
        def after_step(self, record: StepRecord) -> None:
            if "ends" in record.step.info:
                raise ValueError("not today")

    env.attach(Raises())
    for _ in range(2):
        env.step(torch.zeros(2, 1))
    with pytest.raises(ValueError, match="not today"):
        env.step(torch.zeros(2, 1))
    assert env.episode_ids.tolist() == [2, 3]
    env.step(torch.zeros(2, 1))
    env.close()
