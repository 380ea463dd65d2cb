"""Libraries by name: their learners, and whether they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, cast

from headrace.adapters._settings import EXTRAS, LibraryName, PPOSettings, checked_library
from headrace.errors import require_extra

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.adapters._learner import Learner
    from headrace.envs import BatchEnv

_LEARNERS: dict[LibraryName, str] = {
    "headrace": "headrace.adapters.own:OwnLearner",
    "rl_games": "headrace.adapters.rl_games:RlGamesLearner",
    "rsl_rl": "headrace.adapters.rsl_rl:RslRlLearner",
    "sb3": "headrace.adapters.sb3:Sb3Learner",
    "skrl": "headrace.adapters.skrl:SkrlLearner",
}


def require_library(library: LibraryName) -> None:
    """Raise an error that names the extra where a library is absent. Nothing is imported where it is there."""
    needed = EXTRAS[library]
    if needed is not None and importlib.util.find_spec(needed[0]) is None:
        require_extra(needed[0], extra=needed[1], purpose=f"--library {library}")


def make_learner(library: str, env: BatchEnv, settings: PPOSettings | None = None) -> Learner:
    """A library's PPO over an environment, from the shared settings.

    Make and use it inside :func:`headrace.adapters._torch_state.library_run`: libraries draw from torch's, numpy's and
    Python's global random streams, and change global settings.
    """
    name = checked_library(library)
    require_library(name)
    module, _, attribute = _LEARNERS[name].partition(":")
    build = cast("Callable[[BatchEnv, PPOSettings], Learner]", getattr(importlib.import_module(module), attribute))
    return build(env, settings or PPOSettings())
