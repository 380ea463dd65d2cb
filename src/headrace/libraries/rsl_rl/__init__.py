"""rsl_rl 5.5: environment and learner. Needs ``headrace[rsl-rl]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports
from headrace.libraries.registry import EVERY_GROUP, NOT_OURS, CurveTags, LibrarySpec

if TYPE_CHECKING:
    from headrace.libraries.rsl_rl._learner import RslRlEnv

__all__ = ["RslRlEnv"]

LIBRARY = LibrarySpec(
    name="rsl_rl",
    distribution="rsl-rl-lib",
    module="rsl_rl",
    extra="rsl-rl",
    learner="headrace.libraries.rsl_rl._learner:RslRlLearner",
    suffix=".pt",
    marks=frozenset({"actor_state_dict", "critic_state_dict"}),
    meta_key=("infos", "headrace"),
    curves=CurveTags("Train/mean_reward", "Train/mean_episode_length", "iterations"),
    reads={"none": EVERY_GROUP, "gru": EVERY_GROUP - {"image"}},
    cannot_honor=NOT_OURS,
    differences=(
        "a truncated episode bootstraps from the value of the last observation but one",
        "max_grad_norm holds for actor and critic separately",
    ),
)
"""What the commands need to know of it."""

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
