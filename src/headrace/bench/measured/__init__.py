"""Measured runs: train, play, step, start up; each writes a bundle."""
