"""The ``headrace`` command: parse, call, print."""

from headrace._cli.main import main

__all__ = ["main"]
