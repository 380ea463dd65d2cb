"""Lets ``PPO.load`` of Stable-Baselines3 find the classes that it wrote into checkpoints of 0.2 by their modules."""

import sys
from importlib import import_module

for _name, _place in (("_features", "_learner"), ("_replay", "_replay")):
    sys.modules[f"{__name__}.{_name}"] = import_module(f"headrace.libraries.sb3.{_place}")


def __getattr__(name: str) -> object:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it is headrace.libraries.sb3.{name} now")
