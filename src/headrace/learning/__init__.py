"""Value estimators, recurrent modules, collection and the small PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.learning._recurrent import GRU as GRU
    from headrace.learning._recurrent import LSTM as LSTM
    from headrace.learning._returns import Estimate as Estimate
    from headrace.learning._returns import gae as gae
    from headrace.learning._returns import n_step as n_step
    from headrace.learning._returns import td_lambda as td_lambda
    from headrace.learning._returns import vtrace as vtrace
    from headrace.learning._values import compact_values as compact_values
    from headrace.learning._values import repair_next_obs as repair_next_obs
    from headrace.learning._values import rollout_values as rollout_values
    from headrace.learning.collecting import collect as collect
    from headrace.learning.ppo import PPO as PPO
    from headrace.learning.ppo import PPOCfg as PPOCfg

__getattr__, __dir__ = lazy_exports(__name__, __file__)
