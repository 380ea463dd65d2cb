"""The contract of environments, simulations, cameras and learners, as functions to run on your own.

Each raises an AssertionError that names environment, step and field, or returns what it did not check and why. None of
them needs a test framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.testing._batched_simulator import check_row_simulator
    from headrace.testing._camera import check_camera
    from headrace.testing._contract import Tolerance
    from headrace.testing._episodes import check_autoreset, check_episodes_do_not_depend_on_the_batch
    from headrace.testing._learners import check_learner
    from headrace.testing._policies import PolicyCheck, check_policy
    from headrace.testing._simulation import check_simulation
    from headrace.testing._suite import check_env
    from headrace.testing._suspension import (
        check_resume_continues_exactly,
        check_snapshot_round_trip,
        check_suspend_is_exact,
    )

__all__ = [
    "PolicyCheck",
    "Tolerance",
    "check_autoreset",
    "check_camera",
    "check_env",
    "check_episodes_do_not_depend_on_the_batch",
    "check_learner",
    "check_policy",
    "check_resume_continues_exactly",
    "check_row_simulator",
    "check_simulation",
    "check_snapshot_round_trip",
    "check_suspend_is_exact",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
