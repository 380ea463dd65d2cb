"""The task keeps the contract of headrace's environments, and does what it says."""

from __future__ import annotations

import torch
from my_robot.task import INSTRUCTIONS

import headrace
from headrace.testing import check_env


def make(num_envs: int, **more: object) -> headrace.BatchEnv:
    return headrace.make("my-robot-reach", num_envs, overrides={"episode_length": 12, "camera": True}, **more)


def test_the_contract_holds_with_the_camera() -> None:
    assert check_env(make, sizes=(1, 3))


def test_episodes_name_both_pads_and_show_which() -> None:
    env = make(16)
    obs, _ = env.reset(seed=0)
    texts = env.instructions()
    assert set(texts) == set(INSTRUCTIONS)
    assert [INSTRUCTIONS[int(named)] for named in obs["policy"][:, 4:].argmax(dim=1)] == list(texts)
    assert obs["top"].shape == (16, 64, 64, 3)
    assert len(obs["top"].unique()) > 3, "there is something to see"
    env.close()


def test_an_arm_over_its_pad_has_succeeded() -> None:
    env = headrace.make("my-robot-reach", 256, autoreset="disabled")
    env.reset(seed=1)
    ended = torch.zeros(256, dtype=torch.bool)
    while env.active.any():
        info = env.step(2 * torch.rand(256, 2) - 1).info
        if "ends" in info:
            ended[info["ends"].env_ids] = info["ends"].success
    assert 0 < int(ended.sum()) < 256, "random actions reach some pads, not all"
    env.close()
