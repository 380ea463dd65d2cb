"""The tasks that ship with headrace, one module each."""
