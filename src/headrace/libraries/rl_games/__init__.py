"""rl_games 1.6: environment and learner. Needs ``headrace[rl-games]``."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports
from headrace.libraries.registry import EVERY_GROUP, NOT_OURS, CurveTags, LibrarySpec

if TYPE_CHECKING:
    from headrace.libraries.rl_games._learner import RlGamesEnv
    from headrace.libraries.rl_games._learner import RlGamesLearner as RlGamesLearner

__all__ = ["RlGamesEnv"]

LIBRARY = LibrarySpec(
    name="rl_games",
    distribution="rl-games",
    module="rl_games",
    extra="rl-games",
    learner="headrace.libraries.rl_games._learner:RlGamesLearner",
    suffix=".pth",
    marks=frozenset({"model", "optimizer", "epoch"}),
    curves=CurveTags("rewards/iter", "episode_lengths/iter", "iterations"),
    reads={"none": EVERY_GROUP, "gru": EVERY_GROUP - {"image"}},
    cannot_honor=NOT_OURS,
    differences=(
        "a truncated episode bootstraps from the value of the last observation but one",
        "minibatches are the same runs of steps in each epoch, not shuffled",
    ),
)
"""What the commands need to know of it."""

_get, __dir__ = lazy_exports(__name__, __file__, __all__)


def __getattr__(name: str) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # importing it imports parts of torch.jit, which warn
        if name == "RlGamesLearner":  # not public
            from headrace.libraries.rl_games._learner import RlGamesLearner

            return RlGamesLearner
        return _get(name)
