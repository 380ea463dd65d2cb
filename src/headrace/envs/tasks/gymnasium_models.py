"""The MuJoCo models that Gymnasium bundles, by file name."""

from __future__ import annotations

from importlib.resources import files

from headrace.sim.mujoco_api import Model, load_model


def gymnasium_model(name: str, *, camera: str | None = None) -> Model:
    """Compile one of the models in Gymnasium's assets, for example ``ant.xml``.

    Args:
        name: the file.
        camera: a ``<camera>`` element for a model that has none; cameras do not touch the physics.
    """
    mjcf = files("gymnasium.envs.mujoco").joinpath("assets", name).read_text()
    if camera is not None:
        mjcf = mjcf.replace("<worldbody>", f"<worldbody>{camera}", 1)
    return load_model(mjcf)
