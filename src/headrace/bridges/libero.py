"""LIBERO's tasks in the interpreter that has LIBERO: genuine (``sim="robosuite"``), or ours in its older MuJoCo."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from headrace import rng
from headrace.bridges.make import bridge
from headrace.envs.registry import task_cfg
from headrace.envs.tasks.libero.exported import export_directory, find_assets, load_exported
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bridges.bridge_env import BridgeEnv
    from headrace.envs.recipe import EnvRecipe
    from headrace.envs.tasks.libero.task import LiberoCfg

PYTHON_VARIABLE = "HEADRACE_LIBERO_PYTHON"
"""The interpreter that has LIBERO; by default ``.venv-libero/bin/python`` in the working directory."""
_ENTRY = Path(__file__).parents[1] / "envs" / "tasks" / "libero" / "genuine.py"


def make_libero(recipe: EnvRecipe) -> BridgeEnv:
    """Make environments of a task of LIBERO that another interpreter steps; what is missing is an error before that."""
    cfg = cast("LiberoCfg", task_cfg(recipe.source, {**recipe.overrides, "mujoco": ""}))
    if cfg.perturb:
        raise ConfigError(f"perturb: expected none with sim={recipe.sim!r}, got {cfg.perturb}; use sim='mujoco'")
    draws = load_exported(recipe.source).fixtures.shape
    python = Path(os.environ.get(PYTHON_VARIABLE) or ".venv-libero/bin/python")
    if not python.is_file():
        raise ConfigError(
            f"sim={recipe.sim!r}: expected an interpreter with LIBERO, got {python}: no such file; run "
            f"scripts/setup_libero.sh, or set {PYTHON_VARIABLE}"
        )
    settings = {"waits": cfg.waits, "horizon": cfg.episode_length, "gripper": cfg.gripper, "pixels": cfg.pixels}
    kwargs = {
        "name": recipe.source,
        "file": str(export_directory().resolve() / f"{recipe.source.replace('/', '-')}.npz"),
        "assets": str(find_assets()) if recipe.sim == "robosuite" else "",
        "sim": recipe.sim,
        "settings": {**settings, "cameras": list(cfg.cameras)},
    }
    env = bridge(
        python=str(python.absolute()),
        entry=f"{_ENTRY}:make",
        env_kwargs=kwargs,
        num_envs=recipe.num_envs,
        seed=recipe.seed,
        autoreset=recipe.autoreset,
        final_obs=recipe.final_obs,
        episode_stride=recipe.episode_stride,
        workers=recipe.workers,
    )
    env.seeds_of = partial(_seeds, draws[1] if draws[0] else 1)
    env.recipe = recipe
    return env


def _seeds(draws: int, seed: int, episode_ids: Tensor) -> list[int]:
    """Return id and draw of fixtures as one number per episode; the draw is that of the native task."""
    draw = (rng.uniform(seed, episode_ids.cpu(), "fixtures", 1)[:, 0] * draws).to(torch.int64)
    return (episode_ids.cpu() * draws + draw).tolist()
