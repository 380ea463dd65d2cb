"""A step that fails halfway is not silently gone on from, and a step within a step is refused."""

from __future__ import annotations

import pytest
import torch

import headrace
from headrace.envs.registry import make_task
from headrace.errors import EnvError, LifecycleError


class BoomError(RuntimeError):
    """What the task raises."""


@pytest.mark.parametrize("function", ["apply_action", "observe", "reward", "terminated", "reset"])
def test_a_task_that_raises_leaves_an_environment_that_says_so_until_all_are_reset(function) -> None:
    task = make_task("cartpole")
    env = headrace.make(task, 3, seed=1, overrides=None)
    first, _ = env.reset()
    own = getattr(task, function)

    def raise_(*_: object) -> None:
        raise BoomError("no")

    setattr(task, function, raise_)
    some = {"reset_mask": torch.tensor([True, False, False])}
    with pytest.raises(BoomError):
        _ = env.reset(options=some) if function == "reset" else env.step(torch.zeros(3, 1))
    setattr(task, function, own)
    calls = (
        lambda: env.step(torch.zeros(3, 1)),
        env.state_dict,
        env.observe,
        lambda: env.reset(options=some),
    )
    for call in calls:
        with pytest.raises(LifecycleError, match=r"failed halfway \(BoomError: no\).*reset\(\)"):
            call()
    again, _ = env.reset(seed=1)
    assert torch.equal(again["policy"], first["policy"])
    env.step(torch.zeros(3, 1))
    env.close()


def test_a_step_whose_physics_is_interrupted_says_so_as_well(monkeypatch) -> None:
    env = headrace.make("inverted-pendulum", 2)
    env.reset()

    def raise_(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(env.sim, "step", raise_)
        with pytest.raises(KeyboardInterrupt):
            env.step(torch.zeros(2, 1))
    with pytest.raises(LifecycleError, match="failed halfway"):
        env.step(torch.zeros(2, 1))
    env.reset()
    env.step(torch.zeros(2, 1))
    env.close()


class Meddler:
    """An observer that steps the environment it observes."""

    needs: frozenset[str] = frozenset()

    def __init__(self, env) -> None:
        self.env = env

    def after_reset(self, record) -> None:
        pass

    def after_step(self, record) -> None:
        self.env.step(record.actions)


@pytest.mark.parametrize("source", ["cartpole", "gym:Pendulum-v1"])
def test_a_step_within_a_step_is_refused_and_the_outer_one_is_complete(source) -> None:
    env = headrace.EnvRecipe(source, num_envs=2).make()
    env.reset()
    meddler = Meddler(env)
    env.attach(meddler)
    with pytest.raises(LifecycleError, match="while the environment steps"):
        env.step(torch.zeros(2, 1))
    env.detach(meddler)
    assert env.episode_steps.tolist() == [1, 1]
    env.step(torch.zeros(2, 1))
    assert env.episode_steps.tolist() == [2, 2]
    env.close()


def test_a_bridge_whose_environment_raised_says_why_it_cannot_step() -> None:
    env = headrace.bridge("Pendulum-v1", 2)
    env.reset()
    inner = env.backend._group.envs[1].unwrapped
    inner.step = lambda _: 1 / 0
    with pytest.raises(EnvError, match="environment 1 raised"):
        env.step(torch.zeros(2, 1))
    with pytest.raises(LifecycleError, match=r"failed halfway \(EnvError: environment 1 raised"):
        env.step(torch.zeros(2, 1))
    del inner.step
    env.reset()
    env.step(torch.zeros(2, 1))
    env.close()
