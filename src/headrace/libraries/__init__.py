"""RL libraries over our environments: one directory per library, each with its :class:`LibrarySpec`.

``headrace.libraries.rsl_rl``, ``rl_games``, ``skrl``, ``sb3`` and ``torchrl`` have the environments that the libraries
take; ``own`` is our own small PPO behind the same interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.libraries.checkpoint import CheckpointMeta
    from headrace.libraries.learner import InferencePolicy, Learner, LearnerEnv
    from headrace.libraries.registry import CurveTags, LibrarySpec, libraries, library, make_learner, read_curves
    from headrace.libraries.torch_state import library_run

__all__ = [
    "CheckpointMeta",
    "CurveTags",
    "InferencePolicy",
    "Learner",
    "LearnerEnv",
    "LibrarySpec",
    "libraries",
    "library",
    "library_run",
    "make_learner",
    "read_curves",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
