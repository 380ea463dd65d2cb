"""Evaluation: the playing loop, admission rules, journals, results, suites, workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.evaluation._result import EpisodeResult, Evaluation
    from headrace.evaluation.cfg import JournalCfg, PlayCfg, WorkersCfg
    from headrace.evaluation.evaluating import merge
    from headrace.evaluation.ray.cluster import record_episodes
    from headrace.evaluation.suites import evaluate_suite

__all__ = [
    "EpisodeResult",
    "Evaluation",
    "JournalCfg",
    "PlayCfg",
    "WorkersCfg",
    "evaluate_suite",
    "merge",
    "record_episodes",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
