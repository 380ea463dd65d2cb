"""Stable-Baselines3: environment, learner and replay plug, each imported from its module. Needs ``headrace[sb3]``."""

from headrace.adapters.sb3._env import Sb3Env
from headrace.adapters.sb3._learner import Sb3Learner

__all__ = ["Sb3Env", "Sb3Learner"]
