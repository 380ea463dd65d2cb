"""The name of ``headrace.libraries`` in 0.2, which checkpoints of Stable-Baselines3 still hold."""


def __getattr__(name: str) -> object:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it is headrace.libraries.{name} now")
