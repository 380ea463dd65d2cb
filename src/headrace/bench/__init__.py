"""Benchmarks as typed bundles: schema, capture, runs, comparison, report. Names load on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.bench._benchmark import Benchmark, RunSettings
    from headrace.bench._builders import PlayBuilder, RuntimeBuilder
    from headrace.bench._bundle_files import read_bundle
    from headrace.bench._capture import describe_library
    from headrace.bench._formatters import Form, register_formatter
    from headrace.bench._metrics import Metric, metrics, register_metrics, summary_text
    from headrace.bench._report._page import Film, Saving, Story
    from headrace.bench._schema import (
        EpisodePlan,
        PlayBundle,
        RunConfig,
        RuntimeBundle,
        StartupBundle,
        TrainingBundle,
    )
    from headrace.bench._training_builder import SuccessRule, TrainingBuilder

__all__ = [
    "Benchmark",
    "EpisodePlan",
    "Film",
    "Form",
    "Metric",
    "PlayBuilder",
    "PlayBundle",
    "RunConfig",
    "RunSettings",
    "RuntimeBuilder",
    "RuntimeBundle",
    "Saving",
    "StartupBundle",
    "Story",
    "SuccessRule",
    "TrainingBuilder",
    "TrainingBundle",
    "describe_library",
    "metrics",
    "read_bundle",
    "register_formatter",
    "register_metrics",
    "summary_text",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "._benchmark": ("Benchmark", "RunSettings"),
        "._builders": ("PlayBuilder", "RuntimeBuilder"),
        "._bundle_files": ("read_bundle",),
        "._formatters": ("Form", "register_formatter"),
        "._capture": ("describe_library",),
        "._metrics": ("Metric", "metrics", "register_metrics", "summary_text"),
        "._schema": ("EpisodePlan", "PlayBundle", "RunConfig", "RuntimeBundle", "StartupBundle", "TrainingBundle"),
        "._report._page": ("Film", "Saving", "Story"),
        "._training_builder": ("SuccessRule", "TrainingBuilder"),
    },
)
