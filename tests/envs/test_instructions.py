"""``env.instructions``: one text per environment, constant within an episode, a function of the episode alone."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gymnasium import spaces

import headrace
from headrace.bridges import BridgeEnv
from headrace.bridges.make import bridge
from headrace.envs.batch_env import BatchEnv
from headrace.envs.task import Rows
from headrace.envs.tasks.cartpole import Cartpole, CartpoleCfg, cartpole_terms
from headrace.envs.term_task import TermTask
from headrace.errors import ConfigError, EnvError, LifecycleError, ShapeError
from headrace.sim import MujocoSim

sys.path.insert(0, str(Path(__file__).parents[1] / "bridges"))
from toy_envs import ToldEnv

SIDES = ("left", "right", "nowhere")


def side_of(rows: Rows) -> list[str]:
    chosen = (rows.uniform("side", 1)[:, 0] * 3).long().tolist()
    return [f"go {SIDES[side]}, {x:.3f}" for side, x in zip(chosen, rows.get("qpos")[:, 0].tolist(), strict=True)]


class ToldCartpole(Cartpole):
    def instructions(self, rows: Rows) -> Sequence[str]:
        return side_of(rows)


def _told(num_envs: int, form: str = "class", **settings: object) -> BatchEnv:
    if form == "class":
        task: headrace.Task = ToldCartpole(CartpoleCfg(episode_length=6))
    else:
        task = TermTask(dataclasses.replace(cartpole_terms(), episode_length=6, instruction=side_of))
    return BatchEnv(task, MujocoSim(task.model, num_envs, threads=1), seed=3, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["class", "terms"])
def test_instructions_depend_on_the_episode_and_not_on_slots_or_steps(form: str) -> None:
    wide = _told(7, form)
    wide.reset()
    texts = wide.instructions()
    assert len(set(texts)) > 1
    assert wide.instructions(torch.tensor([4, 1])) == (texts[4], texts[1]), "in the order of the ids"
    assert wide.instructions([1, 4]) == (texts[1], texts[4])
    mask = torch.zeros(7, dtype=torch.bool)
    mask[[6, 2]] = True
    assert wide.instructions(mask) == (texts[2], texts[6])
    narrow = _told(2, form)
    narrow.reset()
    for number in range(17):  # episodes of 6 steps: 2, 3, then 4, 5
        expected = range(2 * (number // 6), 2 * (number // 6) + 2)
        assert narrow.instructions() == tuple(texts[episode] for episode in expected)
        narrow.step(torch.zeros(2, 1))


def test_a_snapshot_has_the_instructions() -> None:
    env = _told(3)
    env.reset()
    env.step(torch.zeros(3, 1))
    saved = env.state_dict()
    texts = env.instructions()
    env.reset(options={"episode_ids": torch.tensor([10, 11, 12])})
    assert env.instructions() != texts
    env.load_state_dict(saved)
    assert env.instructions() == texts


def test_tasks_without_instructions_give_empty_texts() -> None:
    env = headrace.make("cartpole", 3, threads=1)
    with pytest.raises(LifecycleError):
        env.instructions()
    env.reset()
    assert env.instructions() == ("", "", "")
    env.close()


def test_one_text_of_a_term_table_is_everyones_and_can_be_overridden() -> None:
    for overrides, expected in (({}, ""), ({"instruction": "balance the pole"}, "balance the pole")):
        env = headrace.make("cartpole-terms", 2, threads=1, overrides=overrides)
        env.reset()
        assert env.instructions() == (expected, expected)
        env.close()


def test_a_task_that_gives_too_few_texts_is_named() -> None:
    class Short(Cartpole):
        def instructions(self, rows: Rows) -> Sequence[str]:
            return []

    task = Short(CartpoleCfg())
    with pytest.raises(ShapeError, match=r"Short.instructions: expected one text for one row, got \[\]"):
        BatchEnv(task, MujocoSim(task.model, 2, threads=1))


def _bridged(kind: str, told_in: str) -> BridgeEnv:
    factory = functools.partial(ToldEnv, told_in=told_in)
    return bridge([factory] * 4, seed=8, executor=kind, workers=None if kind == "inline" else 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("told_in", ["obs", "info"])
@pytest.mark.parametrize("kind", ["inline", "threads", "processes"])
def test_bridged_environments_say_what_to_do_in_texts_of_observation_or_info(kind: str, told_in: str) -> None:
    env = _bridged(kind, told_in)
    assert "goal" not in env.single_observation_space.spaces, "tensors stay tensors"
    env.reset()
    begun = 0
    for _ in range(25):
        lengths = env.observe()["policy"][:, 2].long().tolist()
        assert env.instructions() == tuple(f"walk {length} steps" for length in lengths)
        step = env.step(torch.zeros(4, 2))
        begun += int((step.terminated | step.truncated).sum())
    assert begun > 4
    env.close()


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_a_bridge_goes_on_from_a_snapshot_of_an_episode_with_another_instruction(kind: str) -> None:
    env = _bridged(kind, "obs")
    env.reset()
    saved, told = env.state_dict(), env.instructions()
    env.reset(options={"episode_ids": torch.arange(40, 44)})
    assert env.instructions() != told
    fresh = _bridged(kind, "obs")
    for each in (env, fresh):
        each.load_state_dict(saved)
        assert each.instructions() == told
        each.step(torch.zeros(4, 2))
        each.close()


def test_a_bridged_text_that_changes_within_an_episode_is_an_error() -> None:
    env = bridge([functools.partial(ToldEnv, fickle=True)] * 2, seed=8)
    env.reset()
    with pytest.raises(EnvError, match=r"environment 0.*expected the instruction 'walk \d steps' for the whole"):
        env.step(torch.zeros(2, 2))


def test_of_several_texts_the_one_that_is_named_so_is_the_instruction() -> None:
    class Two(ToldEnv):
        def __init__(self, name: str) -> None:
            super().__init__(told_in="nowhere")
            self.observation_space = spaces.Dict(
                {**self.observation_space, "hint": spaces.Text(9), name: spaces.Text(9)}
            )
            self.name = name

        def _told(self, obs: dict[str, object]) -> dict[str, object]:
            return obs | {"hint": "hurry", self.name: "stop"}

    env = bridge([lambda: Two("prompt")])
    env.reset()
    assert env.instructions() == ("stop",)
    with pytest.raises(ConfigError, match="expected one Text space, or one with a name of"):
        bridge([lambda: Two("note")])
