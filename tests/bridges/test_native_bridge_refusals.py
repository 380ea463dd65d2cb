"""What a bridge of single environments refuses: settings, observations, snapshots that cannot be what they say."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from toy_envs import DictEnv, PlainEnv, SpacesEnv

from headrace.bridges.make import bridge
from headrace.errors import ConfigError, DataError, DtypeError, EnvError, LifecycleError, UnsupportedError


def test_what_cannot_be_saved_faithfully_is_refused() -> None:
    class Views(PlainEnv):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gymnasium.make("InvertedPendulum-v5").unwrapped
            self.memory: Any = self.inner.data.qpos  # type: ignore[attr-defined]  # a MuJoCo environment

    env = bridge([Views])
    with pytest.raises(LifecycleError):
        env.state_dict()
    env.reset()
    with pytest.raises(UnsupportedError, match=r"Views\.inner"):
        env.state_dict()
    del env.backend._group.envs[0].inner  # type: ignore[attr-defined]  # the toy's own attribute
    with pytest.raises(UnsupportedError, match=r"Views\.memory"):
        env.state_dict()


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="spaces of environment 0"):
        bridge([PlainEnv, DictEnv])
    with pytest.raises(ConfigError, match="action space"):
        bridge([lambda: PlainEnv(spaces.Tuple([spaces.Discrete(2)]))])
    with pytest.raises(ConfigError, match="observation space"):
        bridge([lambda: SpacesEnv(spaces.Text(4))])
    with pytest.raises(ConfigError, match="distinct"):
        bridge(
            [lambda: SpacesEnv(spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})}))]
        )
    with pytest.raises(ConfigError, match="executor"):
        bridge([PlainEnv], executor="process")  # type: ignore[arg-type]  # a typo
    with pytest.raises(ConfigError, match="workers"):
        bridge([PlainEnv], workers=2)
    with pytest.raises(ConfigError, match="num_envs"):
        bridge([PlainEnv], 3)
    with pytest.raises(DtypeError, match="list of functions"):
        bridge(SyncVectorEnv([PlainEnv]))  # type: ignore[arg-type]  # its single environments are bridged
    for nothing in ([], PlainEnv, [PlainEnv()]):
        with pytest.raises(DtypeError, match="list of functions"):
            bridge(nothing)  # type: ignore[arg-type]  # mistakes
    env = bridge([PlainEnv])
    with pytest.raises(LifecycleError):
        env.step(torch.zeros(1, dtype=torch.int64))
    env.close()
    with pytest.raises(LifecycleError):
        env.reset()


def test_an_observation_that_is_not_what_the_space_says_is_refused() -> None:
    class Liar(PlainEnv):
        def step(self, action: Any) -> Any:
            return (self.lie, *super().step(action)[1:])

    class Wide(Liar):
        lie = np.zeros(2, dtype=np.float32)

    class Complex(Liar):
        lie = np.zeros(1, dtype=np.complex64)

    for liar, message in ((Wide, r"expected float32 \(1,\)"), (Complex, "expected float32")):
        env = bridge([liar])
        env.reset()
        with pytest.raises(EnvError, match=message):
            env.step(torch.zeros(1, dtype=torch.int64))


def test_answers_may_be_lists_and_flags_whatever_is_true_or_false() -> None:
    class Flag:
        def __bool__(self) -> bool:
            return True

        def __array__(self, *_: object, **__: object) -> Any:
            raise TypeError("on another device")

    class Lists(PlainEnv):
        def reset(self, **settings: Any) -> Any:
            return list(super().reset(**settings))

        def step(self, action: Any) -> Any:
            obs, reward, _, _, info = super().step(action)
            return [obs, reward, Flag(), False, info]

    env = bridge([Lists])
    env.reset()
    step = env.step(torch.zeros(1, dtype=torch.int64))
    assert (step.terminated.tolist(), step.truncated.tolist()) == ([True], [False])


def test_an_environment_that_cannot_be_closed_says_so_after_the_others_were_closed() -> None:
    closed: list[str] = []

    class Fine(PlainEnv):
        def close(self) -> None:
            closed.append("fine")

    class Full(PlainEnv):
        def close(self) -> None:
            closed.append("full")
            raise OSError("no space left for the last frame")

    env = bridge([Full, Fine])
    with pytest.raises(OSError, match="no space left for the last frame"):
        env.close()
    assert closed == ["full", "fine"]


def test_a_damaged_snapshot_is_refused_before_anything_is_changed() -> None:
    env = bridge("CartPole-v1", 2)
    env.reset()
    state = dict(env.state_dict())
    env.step(torch.zeros(2, dtype=torch.int64))
    before = env.observe()["policy"]
    state["episodes"] = {name: values for name, values in state["episodes"].items() if name != "steps"}
    with pytest.raises(DataError, match=r"episodes\.steps"):
        env.load_state_dict(state)
    assert torch.equal(env.observe()["policy"], before)
    assert env.episode_steps.tolist() == [1, 1]


def test_an_id_that_gymnasium_does_not_know_is_our_own_error() -> None:
    with pytest.raises(ConfigError, match="expected the id of a Gymnasium environment, got 'NoSuch-v1'"):
        bridge("NoSuch-v1", num_envs=2)
