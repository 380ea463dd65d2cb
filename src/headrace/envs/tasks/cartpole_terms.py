"""``cartpole`` as terms: the same numbers as the class, bit for bit."""

from __future__ import annotations

import dataclasses

from headrace.envs._action_terms import Effort
from headrace.envs._image_spec import ImageSpec
from headrace.envs._term_library import (
    Alive,
    JointOutOfRange,
    JointPositionL2,
    JointPositions,
    JointVelocities,
    ResetJoints,
)
from headrace.envs._term_task import TermTask
from headrace.envs._terms import ObservationTerm, ResetEvent, RewardTerm, SuccessTerm, TermTaskCfg
from headrace.envs.tasks.cartpole import CARTPOLE_XML
from headrace.sim._camera import CameraSpec

__all__ = ["TermTask", "cartpole_camera_terms", "cartpole_terms"]

_JOINTS = ("slider", "hinge")


def cartpole_terms() -> TermTaskCfg:
    """The settings of ``cartpole-terms``."""
    return TermTaskCfg(
        model=CARTPOLE_XML.read_text(),
        decimation=2,
        episode_length=300,
        actions={"push": Effort()},
        observations={
            "policy": {
                "positions": ObservationTerm(function=JointPositions(joints=_JOINTS)),
                "velocities": ObservationTerm(function=JointVelocities(joints=_JOINTS)),
            }
        },
        rewards={
            "alive": RewardTerm(function=Alive()),
            "lean": RewardTerm(function=JointPositionL2(joints=("hinge",)), weight=-1.0),
            "stray": RewardTerm(function=JointPositionL2(joints=("slider",)), weight=-0.02),
        },
        terminations={
            "off_the_rail": JointOutOfRange(joint="slider", low=-2.4, high=2.4),
            "fallen": JointOutOfRange(joint="hinge", low=-0.8, high=0.8),
        },
        success=SuccessTerm(measure="the pole is still up after the last step"),
        events={
            "start": ResetEvent(function=ResetJoints(joints=_JOINTS, positions=(0.5, 0.25), velocities=(0.25, 0.25)))
        },
    )


def cartpole_camera_terms() -> TermTaskCfg:
    """The settings of ``cartpole-camera-terms``: the same terms with a camera for the policy."""
    plain = cartpole_terms()
    picture = ImageSpec(camera=CameraSpec(name="side", width=48, height=48), frames=2)
    return dataclasses.replace(plain, observations={"critic": plain.observations["policy"]}, images={"policy": picture})
