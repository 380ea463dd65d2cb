"""Benchmarks as typed bundles: schema, capture, runs, comparison, report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.bench._bundle_files import read_bundle as read_bundle
    from headrace.bench.builders import SuccessRule as SuccessRule
    from headrace.bench.comparing import report as report
    from headrace.bench.comparing import sweep as sweep
    from headrace.bench.comparison import CompareCfg as CompareCfg
    from headrace.bench.measured.run import run as run
    from headrace.bench.measured.run import runtime as runtime
    from headrace.bench.measured.run import startup as startup

__getattr__, __dir__ = lazy_exports(__name__, __file__)
