"""The name of ``headrace.libraries`` in 0.2, which checkpoints of Stable-Baselines3 still hold."""

from headrace._lazy import MOVED


def __getattr__(name: str) -> object:
    place = "headrace.libraries.learner" if name == "own" else f"headrace.libraries.{name}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it is {MOVED.get(place, place)} now")
