"""Value estimators and recurrent modules."""

from headrace.learning.returns import Estimate, gae, monte_carlo, n_step, td0, td_lambda, vtrace

__all__ = ["Estimate", "gae", "monte_carlo", "n_step", "td0", "td_lambda", "vtrace"]
