"""rsl_rl 5.5: environment and learner. Needs ``headrace[rsl-rl]``."""

from headrace.adapters.rsl_rl._env import RslRlEnv
from headrace.adapters.rsl_rl._learner import RslRlLearner

__all__ = ["RslRlEnv", "RslRlLearner"]
