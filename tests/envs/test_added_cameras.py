"""Cameras that the settings of a task add to bodies of its model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import headrace
from headrace.envs.image_spec import ImageSpec
from headrace.envs.recipe import with_overrides
from headrace.envs.tasks.cartpole import cartpole_terms
from headrace.envs.term_task import TermTask, TermTaskCfg
from headrace.envs.terms import AddedCamera
from headrace.errors import ConfigError, UnknownNameError
from headrace.sim import CameraSpec
from headrace.sim.mujoco_api import mujoco

UPRIGHT = (0.7071067811865476, 0.7071067811865476, 0.0, 0.0)
"""Look along y, with z up."""


def with_camera(**settings: object) -> TermTaskCfg:
    plain = cartpole_terms()
    camera = AddedCamera(**{"position": (0.0, -2.0, 0.3), "quaternion": UPRIGHT, **settings})  # type: ignore[arg-type]
    image = ImageSpec(camera=CameraSpec(name="near", width=32, height=32))
    return dataclasses.replace(plain, cameras={"near": camera}, images={"image": image})


def test_a_camera_on_a_body_moves_with_it_and_shows_what_mujocos_would() -> None:
    world, cart = (headrace.make(TermTask(with_camera(body=body)), 2, seed=0) for body in ("world", "cart"))
    plain = mujoco.MjSpec.from_string(cartpole_terms().model)
    plain.body("cart").add_camera(name="near", pos=[0, -2, 0.3], quat=UPRIGHT, fovy=45)
    written = headrace.make(
        TermTask(dataclasses.replace(with_camera(), cameras={}, model=_compiled_xml(plain))), 2, seed=0
    )
    pictures = {}
    for name, env in (("world", world), ("cart", cart), ("written", written)):
        env.reset()
        for _ in range(5):
            step = env.step(torch.ones(2, 1))
        pictures[name] = step.obs["image"]
    assert torch.equal(pictures["cart"], pictures["written"])
    assert not torch.equal(pictures["cart"], pictures["world"])


def _compiled_xml(spec: object) -> str:
    spec.compile()  # type: ignore[attr-defined]
    return spec.to_xml()  # type: ignore[attr-defined]


def test_its_place_and_lens_are_settings_and_physics_does_not_notice_it() -> None:
    cfg = with_overrides(with_camera(), {"cameras.near.fovy": 20.0, "cameras.near.position": (0.0, -3.0, 0.3)})
    task = TermTask(cfg)
    number = task.model.camera("near").id
    assert task.model.cam_fovy[number] == 20.0  # type: ignore[attr-defined]
    assert np.array_equal(task.model.cam_pos[number], (0.0, -3.0, 0.3))  # type: ignore[attr-defined]
    seen, plain = headrace.make(task, 3, seed=1), headrace.make(TermTask(cartpole_terms()), 3, seed=1)
    seen.reset()
    plain.reset()
    for _ in range(20):
        assert torch.equal(seen.step(torch.ones(3, 1)).obs["policy"], plain.step(torch.ones(3, 1)).obs["policy"])


def test_a_body_that_is_not_there_and_a_name_that_is_taken_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"body of the camera 'near'.*did you mean 'cart'"):
        TermTask(with_camera(body="cartt"))
    taken = dataclasses.replace(cartpole_terms(), cameras={"side": AddedCamera()})
    with pytest.raises(ConfigError, match=r"cameras: side cannot be added"):
        TermTask(taken)
