"""Our own small PPO as a learner like the others. Needs the core alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports
from headrace.libraries.registry import EVERY_GROUP, OWN_CURVES, LibrarySpec

if TYPE_CHECKING:
    from headrace.libraries.own._learner import OwnLearner

__all__ = ["OwnLearner"]

LIBRARY = LibrarySpec(
    name="headrace",
    distribution="headrace",
    learner="headrace.libraries.own:OwnLearner",
    suffix=".pt",
    marks=frozenset({"format", "network", "state_dict"}),
    loader="headrace.libraries.own._learner:read_policy",
    curves=OWN_CURVES,
    reads={"none": EVERY_GROUP, "gru": EVERY_GROUP, "min_gru": EVERY_GROUP},
    cannot_honor={"reward_scale": "it normalizes value targets instead, whatever the scale of the rewards"},
    differences=(
        "the learning rate adapts to the KL divergence of an epoch; learning_rate is where it begins",
        "minibatches are whole slices of environments, not shuffled steps",
        "value targets are normalized; rewards are not scaled",
        "images go through a layer of image_features before the hidden layers",
    ),
)
"""What the commands need to know of it."""

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
