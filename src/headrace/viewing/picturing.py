"""``headrace.viewing.picture``: what a camera of a task or model sees, in any kind of image, as values and a file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from headrace.envs.recipe import EnvRecipe
from headrace.errors import ConfigError
from headrace.files import check_new, write_whole
from headrace.viewing.live import check_draws, enable_drawing

if TYPE_CHECKING:
    from headrace.bridges.bridge_env import BridgeEnv
    from headrace.envs.batch_env import BatchEnv
    from headrace.envs.recipe import AnyEnv
    from headrace.sim import Simulation
    from headrace.sim.camera.camera import CameraSpec, DataType

_SUFFIXES = (".png", ".npy")
MODEL_SUFFIXES = (".xml", ".mjcf", ".urdf")
"""Endings of files that MuJoCo compiles."""
_DIMMEST = 40
"""Gray of the farthest surface in a picture of depth: still distinct from where nothing is, which is black."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureResult:
    """One image of one environment."""

    values: NDArray[Any]
    """(H, W), or (H, W, 3), as the camera gives it: depth float32 in meters, segmentation int32 geom ids, …"""
    image: NDArray[np.uint8]
    """(H, W, 3): the same for people. Near is bright, each geom has a color, nothing is black."""
    path: Path | None
    """The file that was written, if any."""

    def _repr_png_(self) -> bytes:
        """Return the image for notebooks."""
        from headrace.envs.viewer import png

        return png(self.image)


def picture(
    task: str | EnvRecipe,
    *,
    camera: str | None = None,
    kind: DataType = "rgb",
    renderer: str = "native",
    output: str | Path | None = None,
    width: int = 640,
    height: int = 480,
    num_steps: int = 0,
    seed: int | None = None,
    overrides: Mapping[str, object] | None = None,
) -> PictureResult:
    """Draw the first episode of a task, or a model file, as a camera sees it.

    Args:
        task: a task name, ``module:NAME``, a recipe or a recipe file; an MJCF or URDF file (``.xml``, ``.mjcf``,
            ``.urdf``), drawn in its first keyframe or, without one, its initial pose; ``gym:ID`` and other bridged
            environments, too, which draw themselves, in one way and size.
        camera: camera of the model, or ``free`` for one that sees all of it; None for its first, else the free one.
        kind: ``rgb``, ``gray``, ``depth``, ``segmentation`` or ``normals``.
        renderer: ``native``, ``gl`` (MuJoCo's own picture) or ``warp``.
        output: a new file: ``.png`` for people, ``.npy`` for the values; None writes none.
        width: pixels from left to right.
        height: pixels from top to bottom.
        num_steps: steps of zero actions to take before; of a model file, physics steps.
        seed: of the episode; None for the recipe's, else 0.
        overrides: task settings by path.

    Returns:
        ``values`` as the camera measured them, ``image`` in colors, and ``path`` of the file, None without ``output``.
    """
    from headrace.envs.image_spec import ImageSpec
    from headrace.sim.camera.camera import CameraSpec

    path = None if output is None else Path(output)
    if path is not None and path.suffix not in _SUFFIXES:
        raise ConfigError(f"output (--output): expected a file that ends in .png or .npy, got {path}")
    check_new(path, "output")
    if num_steps < 0:
        raise ConfigError(f"num_steps (--num-steps): expected 0 or more, got {num_steps}")
    file = task if isinstance(task, str) and task.endswith(MODEL_SUFFIXES) else None
    if file is not None and (seed is not None or overrides):
        raise ConfigError(f"seed, overrides: expected none with {task!r}, a model file, got {seed}, {overrides}")
    # imports the module of the task, which may register a renderer
    recipe = None if file is not None else EnvRecipe.of(task, 1, seed=seed, overrides=overrides)
    # refuses a kind, a renderer or a size that is not there before anything is made
    wanted = CameraSpec(name=camera or "", width=width, height=height, data_types=(kind,))
    ImageSpec(camera=wanted, kind=kind, renderer=renderer)
    if recipe is None:
        values, image = _model_picture(cast("str", file), wanted, kind, renderer, num_steps)
    elif recipe.bridged:
        if camera is not None or kind != "rgb" or renderer != "native":
            raise ConfigError(
                f"camera, kind, renderer: expected none with {recipe.source!r}, which draws itself, got {camera!r}, "
                f"{kind!r}, {renderer!r}"
            )
        values = image = _draw_bridged(recipe, num_steps)
    else:
        values, image = _task_picture(recipe, wanted, kind, renderer, num_steps)
    return _write(path, values, image)


def _write(path: Path | None, values: NDArray[Any], image: NDArray[np.uint8]) -> PictureResult:
    from headrace.envs.viewer import png

    if path is not None and path.suffix == ".png":
        write_whole(path, png(image))
    elif path is not None:
        write_whole(path, lambda part: np.save(part, values))
    return PictureResult(values=values, image=image, path=path)


def _task_picture(
    recipe: EnvRecipe, wanted: CameraSpec, kind: DataType, renderer: str, num_steps: int
) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Return what a camera of the model measures, and the same for people."""
    from headrace.envs.image_spec import show_groups

    with closing(cast("BatchEnv", recipe.make(num_envs=1))) as env:
        _rest(env, num_steps)
        return _draw(env.sim, show_groups(env.task.images, wanted), kind, renderer)


def _model_picture(
    file: str, wanted: CameraSpec, kind: DataType, renderer: str, num_steps: int
) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Return the same of a model that no task is about."""
    import torch

    from headrace.sim import MujocoSim, load_model

    model = load_model(file)
    with closing(MujocoSim(model, 1)) as sim:
        if model.nkey:
            sim.field("qpos")[0] = torch.from_numpy(model.key_qpos[0].copy())
        sim.forward(None)
        if num_steps:
            sim.step(None, num_steps)
        return _draw(sim, wanted, kind, renderer)


def _draw(sim: Simulation, wanted: CameraSpec, kind: str, renderer: str) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Return the values of one picture, and the same for people."""
    from headrace.envs.viewer import Viewer
    from headrace.sim.camera.camera import camera_names

    spec = replace(wanted, name=wanted.name or camera_names(sim.model)[0])
    with closing(Viewer(sim, spec=spec, renderer=renderer)) as viewer:
        values = getattr(viewer.frames(), kind)[0]
    return values, _for_people(values, kind, float(sim.model.vis.map.zfar * sim.model.stat.extent))


def _rest(env: AnyEnv, num_steps: int) -> None:
    """Begin the first episode and take steps of zero actions."""
    from headrace.bench.stepping import action_maker

    env.reset()
    rest = action_maker("zero", env.single_action_space, 1, env.device, seed=env.seed)
    for _ in range(num_steps):
        env.step(rest())


def _draw_bridged(recipe: EnvRecipe, num_steps: int) -> NDArray[np.uint8]:
    """Return what the environment draws of itself."""
    with closing(cast("BridgeEnv", enable_drawing(recipe).make(num_envs=1))) as env:
        check_draws(env)
        _rest(env, num_steps)
        drawn = env.render_each()
        assert drawn is not None  # checked above
        return np.array(drawn[0])


def _for_people(values: NDArray[Any], kind: str, far: float) -> NDArray[np.uint8]:
    if kind == "rgb":
        return values
    if kind == "normals":
        return np.rint((values + 1.0) * 127.5).astype(np.uint8)
    if kind == "segmentation":
        palette = np.random.default_rng(0).integers(64, 256, (int(values.max(initial=0)) + 2, 3)).astype(np.uint8)
        palette[-1] = 0  # the place of -1: nothing
        return palette[values]
    gray = values if kind == "gray" else _brightness(values, far)
    return np.repeat(gray[..., None], 3, axis=-1)


def _brightness(depth: NDArray[np.float32], far: float) -> NDArray[np.uint8]:
    seen = depth < np.float32(far)
    if not seen.any():
        return np.zeros(depth.shape, np.uint8)
    near, most = float(depth[seen].min()), float(depth[seen].max())
    away = (depth - near) / max(most - near, 1e-6)
    return np.where(seen, np.rint(255 - (255 - _DIMMEST) * away.clip(0, 1)), 0).astype(np.uint8)
