"""Stable-Baselines3: replay plug and learner."""
