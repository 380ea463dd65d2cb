"""Our own small PPO as a learner like the others. Needs the core alone."""

from headrace.adapters.own._learner import OwnLearner

__all__ = ["OwnLearner"]
