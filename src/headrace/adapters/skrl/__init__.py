"""skrl 2.1: environment and learner. Needs ``headrace[skrl]``."""

from headrace.adapters.skrl.env import SkrlEnv
from headrace.adapters.skrl.learner import SkrlLearner

__all__ = ["SkrlEnv", "SkrlLearner"]
