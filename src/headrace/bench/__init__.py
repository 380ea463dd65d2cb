"""Benchmarks as typed bundles: schema, capture, runs, comparison, report. Names load on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.bench._benchmark import Benchmark, RunSettings
    from headrace.bench._builders import EpisodeTally, PlayBuilder, RuntimeBuilder, StartupBuilder
    from headrace.bench._bundle_files import bundle_paths, parse_bundle, read_bundle
    from headrace.bench._capture import environment_variables
    from headrace.bench._comparison import CompareCfg, Comparison, compare
    from headrace.bench._comparison_output import table
    from headrace.bench._learning_schema import (
        CheckpointInfo,
        EarlyStop,
        EpisodeCounts,
        EpisodePlan,
        Learning,
        LearningCurve,
        LibraryDescriptor,
        PerEnv,
        PerEpisode,
        PolicyDescriptor,
        TrainingTime,
    )
    from headrace.bench._libraries import describe_library
    from headrace.bench._metrics import Metric, metrics, register_metrics
    from headrace.bench._schema import (
        BUNDLES,
        SCHEMA_VERSION,
        Bundle,
        PlayBundle,
        RunConfig,
        RuntimeBundle,
        StartupBundle,
        TrainingBundle,
    )
    from headrace.bench._statistic import Proportion, Statistic
    from headrace.bench._training_builder import SuccessRule, TrainingBuilder
    from headrace.bench.formatters import FORMATTERS, Form, register_formatter, summary_text

__all__ = [
    "BUNDLES",
    "FORMATTERS",
    "SCHEMA_VERSION",
    "Benchmark",
    "Bundle",
    "CheckpointInfo",
    "CompareCfg",
    "Comparison",
    "EarlyStop",
    "EpisodeCounts",
    "EpisodePlan",
    "EpisodeTally",
    "Form",
    "Learning",
    "LearningCurve",
    "LibraryDescriptor",
    "Metric",
    "PerEnv",
    "PerEpisode",
    "PlayBuilder",
    "PlayBundle",
    "PolicyDescriptor",
    "Proportion",
    "RunConfig",
    "RunSettings",
    "RuntimeBuilder",
    "RuntimeBundle",
    "StartupBuilder",
    "StartupBundle",
    "Statistic",
    "SuccessRule",
    "TrainingBuilder",
    "TrainingBundle",
    "TrainingTime",
    "bundle_paths",
    "compare",
    "describe_library",
    "environment_variables",
    "metrics",
    "parse_bundle",
    "read_bundle",
    "register_formatter",
    "register_metrics",
    "summary_text",
    "table",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "._benchmark": ("Benchmark", "RunSettings"),
        "._builders": ("EpisodeTally", "PlayBuilder", "RuntimeBuilder", "StartupBuilder"),
        "._bundle_files": ("bundle_paths", "parse_bundle", "read_bundle"),
        "._capture": ("environment_variables",),
        ".formatters": ("FORMATTERS", "Form", "register_formatter", "summary_text"),
        "._learning_schema": (
            *("CheckpointInfo", "EarlyStop", "EpisodeCounts", "EpisodePlan", "Learning", "LearningCurve"),
            *("LibraryDescriptor", "PerEnv", "PerEpisode", "PolicyDescriptor", "TrainingTime"),
        ),
        "._comparison": ("CompareCfg", "Comparison", "compare"),
        "._comparison_output": ("table",),
        "._libraries": ("describe_library",),
        "._metrics": ("Metric", "metrics", "register_metrics"),
        "._schema": (
            *("BUNDLES", "SCHEMA_VERSION", "Bundle", "PlayBundle", "RunConfig", "RuntimeBundle", "StartupBundle"),
            "TrainingBundle",
        ),
        "._statistic": ("Proportion", "Statistic"),
        "._training_builder": ("SuccessRule", "TrainingBuilder"),
    },
)
