"""Benchmarks as typed bundles: schema, capture, runs, comparison, report. Names load on use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.bench.benchmark import Benchmark, RunSettings
    from headrace.bench.builders import EpisodeTally, PlayBuilder, RuntimeBuilder, StartupBuilder
    from headrace.bench.bundle_files import bundle_paths, parse_bundle, read_bundle
    from headrace.bench.capture import environment_variables
    from headrace.bench.comparison import CompareCfg, Comparison, compare
    from headrace.bench.formatters import FORMATTERS, summary_text
    from headrace.bench.learning_schema import (
        CheckpointInfo,
        EarlyStop,
        EpisodeCounts,
        EpisodePlan,
        Learning,
        LearningCurve,
        LibraryDescriptor,
        PerEnv,
        PolicyDescriptor,
        TrainingTime,
    )
    from headrace.bench.libraries import LIBRARIES, describe_library
    from headrace.bench.schema import (
        BUNDLES,
        SCHEMA_VERSION,
        Bundle,
        PlayBundle,
        RunConfig,
        RuntimeBundle,
        StartupBundle,
        TrainingBundle,
    )
    from headrace.bench.statistic import Proportion, Statistic
    from headrace.bench.training_builder import SuccessRule, TrainingBuilder

__all__ = [
    "BUNDLES",
    "FORMATTERS",
    "LIBRARIES",
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
    "Learning",
    "LearningCurve",
    "LibraryDescriptor",
    "PerEnv",
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
    "parse_bundle",
    "read_bundle",
    "summary_text",
]

_HOMES = {
    "benchmark": ("Benchmark", "RunSettings"),
    "builders": ("EpisodeTally", "PlayBuilder", "RuntimeBuilder", "StartupBuilder"),
    "bundle_files": ("bundle_paths", "parse_bundle", "read_bundle"),
    "capture": ("environment_variables",),
    "formatters": ("FORMATTERS", "summary_text"),
    "learning_schema": (
        *("CheckpointInfo", "EarlyStop", "EpisodeCounts", "EpisodePlan", "Learning", "LearningCurve"),
        *("LibraryDescriptor", "PerEnv", "PolicyDescriptor", "TrainingTime"),
    ),
    "comparison": ("CompareCfg", "Comparison", "compare"),
    "libraries": ("LIBRARIES", "describe_library"),
    "schema": (
        *("BUNDLES", "SCHEMA_VERSION", "Bundle", "PlayBundle", "RunConfig", "RuntimeBundle", "StartupBundle"),
        "TrainingBundle",
    ),
    "statistic": ("Proportion", "Statistic"),
    "training_builder": ("SuccessRule", "TrainingBuilder"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
