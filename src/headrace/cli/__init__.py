"""The ``headrace`` command: parse, call, print."""
