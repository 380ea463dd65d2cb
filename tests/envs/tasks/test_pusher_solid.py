"""``pusher-solid``: pusher-goal in everything but the weight of the object, which can be pushed."""

from __future__ import annotations

import mujoco
import numpy as np
import torch

from headrace.envs.registry import make, make_task


def test_only_the_object_differs_from_pusher_goal_and_only_by_its_weight() -> None:
    light, solid = (make_task(name).model for name in ("pusher-goal", "pusher-solid"))
    thing = solid.body("object").id
    others = np.arange(solid.nbody) != thing
    for name in ("body_mass", "body_inertia"):
        assert np.array_equal(getattr(light, name)[others], getattr(solid, name)[others])
    for name in ("body_pos", "geom_size", "geom_pos", "jnt_range", "dof_damping", "dof_armature", "actuator_ctrlrange"):
        assert np.array_equal(getattr(light, name), getattr(solid, name))
    # a cylinder of 5 cm radius and 10 cm height at 50 kg/m³
    assert np.isclose(solid.body_mass[thing], 50 * np.pi * 0.05**2 * 0.1)


def test_a_finger_that_overlaps_the_object_pushes_it_away_where_the_light_one_hardly_feels_it() -> None:
    accelerations = {}
    for name in ("pusher-goal", "pusher-solid"):
        model = make_task(name).model
        data = mujoco.MjData(model)
        # the crossbar level with the object and 1 cm into it
        data.qpos[:7] = (0.17, 0.68, -1.34, -1.11, -0.15, -0.14, 1.01)
        mujoco.mj_forward(model, data)
        bar, frame = data.body("tips_arm").xpos, data.body("tips_arm").xmat.reshape(3, 3)
        place = bar + 0.06 * frame[:, 0]
        data.qpos[7:9] = (place[1] + 0.05, place[0] - 0.45)
        mujoco.mj_forward(model, data)
        accelerations[name] = float(np.linalg.norm(data.qacc[7:9]))
    assert accelerations["pusher-goal"] < 1.0
    assert accelerations["pusher-solid"] > 10.0


def test_episodes_begin_as_those_of_pusher_goal() -> None:
    first = [make(name, 8, seed=4).reset()[0]["policy"] for name in ("pusher-goal", "pusher-solid")]
    assert torch.equal(*first)
