"""``headrace view`` and ``headrace picture``: watch a task, or draw what one of its cameras sees."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from headrace._progress import say
from headrace.cli.records import Command, Positional, keywords
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.sim import load_model
from headrace.viewing.live import view
from headrace.viewing.picturing import MODEL_SUFFIXES, picture

if TYPE_CHECKING:
    from headrace.envs.batch_env import BatchEnv


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Step TASK in real time and show all environments, tiled, on a page of this machine. A click on a tile suspends
    that environment, another resumes it; the page can pause, make single steps and slow down. Ctrl-C ends."""

    task: Annotated[str, Positional("TASK")]
    env: EnvKeywords
    policy: str = "random"
    """random, zero, or any policy that 'headrace evaluate' plays: a checkpoint, its directory, latest or best of runs/,
    module:name, lerobot:DIR, the address of a server."""
    num_steps: int | None = None
    """Steps of the batch (default: until Ctrl-C)."""
    port: int = 8765
    renderer: str = "native"
    camera: str | None = None
    """Camera of the model, or free for one that sees all of it and follows the mouse (default: its first, else
    free)."""


def _view(given: ViewOptions) -> int:
    view(**keywords(given), on_url=lambda url: say(f"{url}  (Ctrl-C ends)"))
    return 0


@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    """Draw the first episode of TASK, or an MJCF or URDF file, as a camera sees it. A .png is for people: in depth
    near is bright, in segmentation each geom has a color, nothing is black. A .npy has the camera's own values. Without
    --output, a .png is written here, named after TASK and kind."""

    task: Annotated[str, Positional("TASK")]
    output: str | None = None
    camera: str | None = None
    """Camera of the model, or free for one that sees all of it (default: its first, else free)."""
    kind: Literal["rgb", "gray", "depth", "segmentation", "normals"] = "rgb"
    """What the image shows."""
    renderer: str = "native"
    width: int = 640
    """Pixels from left to right."""
    height: int = 480
    """Pixels from top to bottom."""
    num_steps: int = 0
    seed: int | None = None
    overrides: Mapping[str, object] | None = None
    check_against: Literal["gl"] | None = None
    """Draw TASK, or a model file, with the native camera and with MuJoCo's renderer, and print where they differ."""


def _picture(given: PictureOptions) -> int:
    if given.check_against is not None:
        return _compare(given)
    arguments = {name: value for name, value in keywords(given).items() if name != "check_against"}
    name = Path(given.task).stem if given.task.endswith(MODEL_SUFFIXES) else re.sub(r"[/:.]+", "-", given.task)
    arguments["output"] = given.output or f"{name}-{given.kind}.png"
    result = picture(**arguments)
    shape = " × ".join(map(str, result.values.shape))
    say(f"{result.path}  ({given.kind}, {shape})")
    return 0


def _compare(given: PictureOptions) -> int:
    """Print how the native pictures differ from MuJoCo's; 1 where they are not alike."""
    from headrace.testing import check_camera

    if given.task.endswith(MODEL_SUFFIXES):
        model = load_model(given.task)
    else:
        recipe = EnvRecipe.of(given.task, 1, seed=given.seed, overrides=given.overrides)
        with closing(cast("BatchEnv", recipe.make(num_envs=1))) as env:
            model = env.sim.model
    checks = check_camera(model, camera=given.camera, width=given.width, height=given.height)
    for check in checks:
        say(str(check))
    return int(not all(check.agrees for check in checks))


COMMANDS = {"view": Command(ViewOptions, _view), "picture": Command(PictureOptions, _picture)}
