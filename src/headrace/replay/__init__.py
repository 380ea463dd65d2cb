"""Rollout and replay stores that keep every frame once."""
