"""Benchmarks as typed bundles: schema, capture, runs, comparison, report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.bench._benchmark import Benchmark, RunSettings
    from headrace.bench._builders import PlayBuilder, RuntimeBuilder, SuccessRule, TrainingBuilder
    from headrace.bench._bundle_files import read_bundle
    from headrace.bench._capture import describe_library
    from headrace.bench.comparing import report, sweep
    from headrace.bench.comparison import CompareCfg
    from headrace.bench.measured.run import run, runtime, startup
    from headrace.bench.story import demo

__all__ = [
    "Benchmark",
    "CompareCfg",
    "PlayBuilder",
    "RunSettings",
    "RuntimeBuilder",
    "SuccessRule",
    "TrainingBuilder",
    "demo",
    "describe_library",
    "read_bundle",
    "report",
    "run",
    "runtime",
    "startup",
    "sweep",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
