"""The MuJoCo models that Gymnasium bundles, by file name."""

from __future__ import annotations

from importlib.resources import files

from headrace.sim.mujoco_api import Model, load_model


def gymnasium_model(name: str) -> Model:
    """Compile one of the models in Gymnasium's assets, for example ``ant.xml``."""
    return load_model(files("gymnasium.envs.mujoco").joinpath("assets", name).read_text())
