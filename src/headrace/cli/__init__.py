"""The ``headrace`` command: parse, call, print."""

from headrace.cli.main import main as main
