"""A planar arm that reaches for the pad that its instruction names."""

from my_robot.task import REACH, Reach, ReachCfg

__all__ = ["REACH", "Reach", "ReachCfg"]
