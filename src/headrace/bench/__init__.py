"""Benchmarks as typed bundles: schema, capture, runs, comparison, report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.bench._benchmark import Benchmark, RunSettings
    from headrace.bench._builders import PlayBuilder, RuntimeBuilder
    from headrace.bench._bundle_files import read_bundle
    from headrace.bench._capture import describe_library
    from headrace.bench._training_builder import SuccessRule, TrainingBuilder
    from headrace.bench.comparing import report, sweep
    from headrace.bench.figures import Metric, metrics, register_metrics, summary_text
    from headrace.bench.formatters import Form, register_formatter
    from headrace.bench.measured.play import PlayResult
    from headrace.bench.measured.run import run, runtime, startup
    from headrace.bench.measured.run_cfg import RunResult
    from headrace.bench.measured.train import TrainingResult
    from headrace.bench.story import demo

__all__ = [
    "Benchmark",
    "Form",
    "Metric",
    "PlayBuilder",
    "PlayResult",
    "RunResult",
    "RunSettings",
    "RuntimeBuilder",
    "SuccessRule",
    "TrainingBuilder",
    "TrainingResult",
    "demo",
    "describe_library",
    "metrics",
    "read_bundle",
    "register_formatter",
    "register_metrics",
    "report",
    "run",
    "runtime",
    "startup",
    "summary_text",
    "sweep",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
