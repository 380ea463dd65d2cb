"""rl_games 1.6: environment and learner. Needs ``headrace[rl-games]``."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # importing it imports parts of torch.jit, which warn
    from headrace.adapters.rl_games._env import RlGamesEnv
    from headrace.adapters.rl_games._learner import RlGamesLearner

__all__ = ["RlGamesEnv", "RlGamesLearner"]
