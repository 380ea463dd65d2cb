"""``cartpole`` as a table of terms: the same numbers as the class, bit for bit."""

from __future__ import annotations

import dataclasses

from headrace.envs.action_terms import Effort
from headrace.envs.picture_spec import PictureSpec
from headrace.envs.table_task import TableTask
from headrace.envs.tasks.cartpole import CARTPOLE_XML
from headrace.envs.term_library import (
    Alive,
    JointOutOfRange,
    JointPositionL2,
    JointPositions,
    JointVelocities,
    ResetJoints,
)
from headrace.envs.terms import ObservationTerm, ResetEvent, RewardTerm, SuccessTerm, TableCfg
from headrace.sim.camera import CameraSpec

__all__ = ["TableTask", "cartpole_camera_table", "cartpole_table"]

_JOINTS = ("slider", "hinge")


def cartpole_table() -> TableCfg:
    """The settings of ``cartpole-table``."""
    return TableCfg(
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


def cartpole_camera_table() -> TableCfg:
    """The settings of ``cartpole-camera-table``: the same table with a camera for the policy."""
    table = cartpole_table()
    picture = PictureSpec(camera=CameraSpec(name="side", width=48, height=48), frames=2)
    return dataclasses.replace(
        table, observations={"critic": table.observations["policy"]}, pictures={"policy": picture}
    )
