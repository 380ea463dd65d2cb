"""The contract of environments, simulations, cameras and learners, as functions to run on your own.

Each raises an AssertionError that names environment, step and field, or returns what it did not check and why. None of
them needs a test framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.testing._boundaries import check_env as check_env
    from headrace.testing._contract import Tolerance as Tolerance
    from headrace.testing._simulation import check_simulation as check_simulation
    from headrace.testing.parts import check_camera as check_camera
    from headrace.testing.parts import check_learner as check_learner
    from headrace.testing.parts import check_policy as check_policy

__getattr__, __dir__ = lazy_exports(__name__, __file__)
