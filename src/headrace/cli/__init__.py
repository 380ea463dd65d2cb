"""The ``headrace`` command: parse, call, print."""

from headrace.cli.main import main

__all__ = ["main"]
