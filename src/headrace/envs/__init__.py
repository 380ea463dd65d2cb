"""Batched environments, tasks, registry and bridges."""
