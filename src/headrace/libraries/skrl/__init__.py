"""skrl 2.1: environment and learner. Needs ``headrace[skrl]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports
from headrace.libraries.registry import EVERY_GROUP, NOT_OURS, CurveTags, LibrarySpec

if TYPE_CHECKING:
    from headrace.libraries.skrl._learner import SkrlEnv

__all__ = ["SkrlEnv"]

LIBRARY = LibrarySpec(
    name="skrl",
    distribution="skrl",
    module="skrl",
    extra="skrl",
    learner="headrace.libraries.skrl._learner:SkrlLearner",
    suffix=".pt",
    marks=frozenset({"policy", "value"}),
    curves=CurveTags("Reward / Total reward (mean)", "Episode / Total timesteps (mean)", "steps"),
    reads={"none": EVERY_GROUP},
    cannot_honor=NOT_OURS,
    differences=("no recurrent policies",),
)
"""What the commands need to know of it."""

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
