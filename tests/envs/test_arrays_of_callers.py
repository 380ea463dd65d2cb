"""Arrays that callers have: with gradients, in any order, read-only, backwards."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

import headrace
from headrace.envs.task import Rows, Task, TaskCfg
from headrace.errors import ConfigError, DtypeError
from headrace.sim.mujoco_api import load_model


@pytest.mark.parametrize("rest", [[], [0]])
def test_actions_of_a_policy_with_gradients_are_taken_without_them(rest: list[int]) -> None:
    plain, learning = headrace.make("ant", 3, threads=1), headrace.make("ant", 3, threads=1)
    weights = torch.full((3, 8), 0.1, requires_grad=True)
    for env in (plain, learning):
        env.reset()
        env.suspend(rest)
    for _ in range(2):
        got, expected = learning.step(weights * 2), plain.step((weights * 2).detach())
        assert torch.equal(got.obs["policy"], expected.obs["policy"])
        assert not got.reward.requires_grad
    assert not learning.sim.field("ctrl").requires_grad


@pytest.mark.parametrize("task", ["ant", "cartpole-camera"])
def test_observed_rows_come_in_the_order_of_the_ids(task: str) -> None:
    env = headrace.make(task, 4, threads=1)
    env.reset()
    env.step(torch.zeros(env.action_space.shape), observe=torch.zeros(4, dtype=torch.bool))
    some, everybody = env.observe([3, 0, 2]), env.observe()
    for name, values in some.items():
        assert torch.equal(values, everybody[name][[3, 0, 2]]), name


def test_bridged_rows_come_in_the_order_of_the_ids() -> None:
    env = headrace.bridge("CartPole-v1", 4)
    obs, _ = env.reset()
    assert torch.equal(env.observe([3, 0, 2])["policy"], obs["policy"][[3, 0, 2]])


def test_numpy_arrays_may_be_read_only_and_run_backwards() -> None:
    env = gymnasium.make_vec("headrace/Cartpole-v0", num_envs=3)
    env.reset()
    mask = np.array([False, False, True])
    mask.flags.writeable = False
    env.unwrapped.suspend(mask[::-1])
    assert env.unwrapped.active.tolist() == [False, True, True]
    assert env.unwrapped.step(np.zeros((3, 1), np.float32)[::-1], observe=mask)[4]["observed"].tolist() == mask.tolist()
    env.reset(options={"reset_mask": mask[::-1]})
    assert env.unwrapped.batch.episode_ids.tolist() == [3, 1, 2]
    env.unwrapped.resume(mask[::-1])
    assert env.unwrapped.active.all()


def test_what_is_no_array_of_numbers_is_refused() -> None:
    env = gymnasium.make_vec("headrace/Cartpole-v0", num_envs=2)
    env.reset()
    with pytest.raises(DtypeError, match="actions: expected an array of numbers"):
        env.step(np.array([None, None]))
    for options in ({"reset_mask": "all"}, {"episode_ids": ["a", "b"]}, {"observe": [None]}):
        with pytest.raises(DtypeError, match=next(iter(options))):
            env.reset(options=options)
    with pytest.raises(DtypeError, match="seed: expected an integer"):
        env.reset(seed=np.array([1, 2]))


def test_a_render_mode_that_there_is_not_is_refused() -> None:
    assert gymnasium.make_vec("headrace/Cartpole-v0", num_envs=1, render_mode="rgb_array").render_mode == "rgb_array"
    with pytest.raises(ConfigError, match='expected "rgb_array"'):
        gymnasium.make_vec("headrace/Cartpole-v0", num_envs=1, render_mode="human")


class Sledge(Task):
    """A box on a rail with a motor that has no limits; keeps the dtype of the actions it was given."""

    def __init__(self) -> None:
        model = load_model(
            '<mujoco><worldbody><body><joint name="rail" type="slide" axis="1 0 0"/><geom size="0.1"/></body>'
            '</worldbody><actuator><motor joint="rail"/></actuator></mujoco>'
        )
        super().__init__(TaskCfg(decimation=1, episode_length=10), model, {"policy": 4})
        self.seen: list[Tensor] = []

    def observe(self, rows: Rows) -> dict[str, Tensor]:
        qpos = rows.get("qpos", slice(0, 1, 1))
        again = rows.get("qpos", (0, 0, 0))
        return {"policy": torch.cat((qpos, again), dim=1)}

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        return rows.get("qpos")[:, 0]


def test_a_motor_without_limits_has_an_action_space_without_limits() -> None:
    space = Sledge().action_space
    assert isinstance(space, gymnasium.spaces.Box)
    assert space.low.tolist() == [-np.inf]
    assert space.high.tolist() == [np.inf]


def test_a_slice_and_the_same_numbers_as_columns_are_two_things() -> None:
    env = headrace.make(Sledge(), 2, threads=1)
    assert env.reset()[0]["policy"].shape == (2, 4)


def test_choices_reach_the_task_as_int64() -> None:
    env = headrace.make("cartpole-discrete", 2, threads=1)
    env.reset()
    seen: list[torch.dtype] = []
    reward = env.task.reward
    env.task.reward = lambda rows, actions: (seen.append(actions.dtype), reward(rows, actions))[1]
    env.step(torch.zeros(2, dtype=torch.int32))
    assert seen == [torch.int64]
