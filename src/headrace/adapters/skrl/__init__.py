"""skrl 2.1: environment and learner. Needs ``headrace[skrl]``."""

from headrace.adapters.skrl._env import SkrlEnv
from headrace.adapters.skrl._learner import SkrlLearner

__all__ = ["SkrlEnv", "SkrlLearner"]
