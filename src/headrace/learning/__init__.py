"""Value estimators, recurrent modules, collection and the small PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.learning._min_gru import MinGRU
    from headrace.learning._recurrent import GRU, LSTM
    from headrace.learning._returns import Estimate, gae, monte_carlo, n_step, td0, td_lambda, vtrace
    from headrace.learning._values import compact_values, repair_next_obs, rollout_values
    from headrace.learning.actor_critic import Policy, load_actor_critic, save_actor_critic
    from headrace.learning.collecting import Collector, collect
    from headrace.learning.ppo import PPO, PPOCfg

__all__ = [
    "GRU",
    "LSTM",
    "PPO",
    "Collector",
    "Estimate",
    "MinGRU",
    "PPOCfg",
    "Policy",
    "collect",
    "compact_values",
    "gae",
    "load_actor_critic",
    "monte_carlo",
    "n_step",
    "repair_next_obs",
    "rollout_values",
    "save_actor_critic",
    "td0",
    "td_lambda",
    "vtrace",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
