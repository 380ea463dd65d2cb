"""Evaluation: the playing loop, admission rules, journals, results, suites, workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.evaluation._result import EpisodeResult as EpisodeResult
    from headrace.evaluation._result import Evaluation as Evaluation
    from headrace.evaluation.cfg import JournalCfg as JournalCfg
    from headrace.evaluation.cfg import PlayCfg as PlayCfg
    from headrace.evaluation.cfg import WorkersCfg as WorkersCfg
    from headrace.evaluation.evaluating import merge as merge
    from headrace.evaluation.evaluating import preflight as preflight
    from headrace.evaluation.suites import evaluate_suite as evaluate_suite

__getattr__, __dir__ = lazy_exports(__name__, __file__)
