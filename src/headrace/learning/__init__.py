"""Value estimators and recurrent modules."""

from headrace.learning._min_gru import MinGRU
from headrace.learning._recurrent import GRU, LSTM
from headrace.learning._returns import Estimate, gae, monte_carlo, n_step, td0, td_lambda, vtrace
from headrace.learning._values import compact_values, repair_next_obs, rollout_values

__all__ = [
    "GRU",
    "LSTM",
    "Estimate",
    "MinGRU",
    "compact_values",
    "gae",
    "monte_carlo",
    "n_step",
    "repair_next_obs",
    "rollout_values",
    "td0",
    "td_lambda",
    "vtrace",
]
