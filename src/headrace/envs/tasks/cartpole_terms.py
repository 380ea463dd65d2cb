"""``cartpole`` as terms: the same numbers as the class, bit for bit."""

from __future__ import annotations

import dataclasses

from headrace.envs import terms
from headrace.envs.image_spec import ImageSpec
from headrace.envs.tasks.cartpole import CARTPOLE_XML
from headrace.envs.term_task import TermTask, TermTaskCfg
from headrace.sim.camera.camera import CameraSpec

__all__ = ["TermTask", "cartpole_camera_terms", "cartpole_terms"]

_JOINTS = ("slider", "hinge")


def cartpole_terms() -> TermTaskCfg:
    """Return the settings of ``cartpole-terms``."""
    return TermTaskCfg(
        model=CARTPOLE_XML.read_text(),
        decimation=2,
        episode_length=300,
        actions={"push": terms.Effort()},
        observations={
            "policy": {
                "positions": terms.ObservationTerm(function=terms.JointPositions(joints=_JOINTS)),
                "velocities": terms.ObservationTerm(function=terms.JointVelocities(joints=_JOINTS)),
            }
        },
        rewards={
            "alive": terms.RewardTerm(function=terms.Alive()),
            "lean": terms.RewardTerm(function=terms.JointPositionL2(joints=("hinge",)), weight=-1.0),
            "stray": terms.RewardTerm(function=terms.JointPositionL2(joints=("slider",)), weight=-0.02),
        },
        terminations={
            "off_the_rail": terms.JointOutOfRange(joint="slider", low=-2.4, high=2.4),
            "fallen": terms.JointOutOfRange(joint="hinge", low=-0.8, high=0.8),
        },
        success=terms.SuccessTerm(measure="the pole is still up after the last step"),
        events={
            "start": terms.ResetEvent(
                function=terms.ResetJoints(joints=_JOINTS, positions=(0.5, 0.25), velocities=(0.25, 0.25))
            )
        },
    )


def cartpole_camera_terms() -> TermTaskCfg:
    """Return the settings of ``cartpole-camera-terms``: the same terms with a camera for the policy."""
    plain = cartpole_terms()
    picture = ImageSpec(camera=CameraSpec(name="side", width=48, height=48), frames=2)
    return dataclasses.replace(plain, observations={"critic": plain.observations["policy"]}, images={"policy": picture})
