"""One environment for ``gymnasium.make``: what datasets recover, and what libraries for single environments take."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from headrace.envs.batch_env import BatchEnv
from headrace.envs.registry import make


class SingleEnv(gymnasium.Env[dict[str, NDArray[Any]], Any]):
    """A batch of one without the batch axis; numpy arrays, which the caller owns. The batch is ``env.batch``."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  (Gymnasium's own name and type)

    def __init__(self, batch: BatchEnv, render_mode: str | None = None) -> None:
        self.batch = batch
        self.render_mode = render_mode
        self.observation_space = batch.single_observation_space
        self.action_space = batch.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Start the next episode; with ``seed`` the first one of that seed."""
        super().reset(seed=seed)
        obs, _ = self.batch.reset(seed=seed, options=options)
        return _first(obs), {}

    def step(self, action: Any) -> tuple[dict[str, NDArray[Any]], float, bool, bool, dict[str, Any]]:
        """Advance by one step; an episode that ended needs ``reset``."""
        step = self.batch.step(torch.from_numpy(np.asarray(action)[None]))
        ends = step.info.get("ends")
        success = ends.success if ends is not None else None
        info = {} if success is None else {"success": bool(success[0])}
        return _first(step.obs), float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), info

    def render(self) -> NDArray[np.uint8] | None:  # pyright: ignore[reportIncompatibleMethodOverride]  # one picture
        """Return a picture, uint8 (height, width, 3), where ``render_mode`` is ``rgb_array``."""
        return self.batch.render_each()[0] if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Release the simulation."""
        self.batch.close()


def make_single(task: str, render_mode: str | None = None, **settings: Any) -> SingleEnv:
    """Return the entry point of our Gymnasium ids; ``settings`` as for ``headrace.make``."""
    return SingleEnv(make(task, 1, autoreset="disabled", threads=1, **settings), render_mode)


def _first(obs: dict[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
    return {name: values[0].cpu().numpy() for name, values in obs.items()}
