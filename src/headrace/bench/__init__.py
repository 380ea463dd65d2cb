"""Benchmarks as typed bundles: schema, capture, runs, comparison, report."""
