"""RL libraries over our environments: one directory per library, each with its :class:`LibrarySpec`.

``headrace.libraries.rsl_rl``, ``rl_games``, ``skrl``, ``sb3`` and ``torchrl`` have the environments that the libraries
take; ``own`` is our own small PPO behind the same interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.libraries.learner import Learner as Learner
    from headrace.libraries.registry import LibrarySpec as LibrarySpec
    from headrace.libraries.registry import make_learner as make_learner
    from headrace.libraries.training import library_run as library_run

__getattr__, __dir__ = lazy_exports(__name__, __file__)
