"""Isaac Lab's manager-based tasks as a batched simulator of the row protocol. NOT RUN: written against its
documentation.

Isaac Lab pins numpy 1 and needs Isaac Sim and an RTX GPU, so it stays in an interpreter of its own, and this file is
the entry there; it imports nothing of headrace::

    env = headrace.bridge(
        python="…/isaaclab/bin/python", entry="examples/simulators/isaaclab_rows.py:make", workers=1, num_envs=64,
        env_kwargs={"task": "Isaac-Lift-Cube-Franka-v0"}, timeout=900,
    )

What it relies on, as Isaac Lab 2.3 documents it:

- ``InteractiveScene.get_state(is_relative)`` gives poses, velocities and joint states of every asset, and
  ``scene.reset_to(state, env_ids, is_relative)`` writes them back. ``env.reset_to`` would reset managers and counters.
- managers keep tensors with a row per environment, and histories in rings (``CircularBuffer``) with one pointer for
  all;
- ``step`` resets ended rows by itself; with a recorder term, ``record_pre_reset`` comes before that, when ``obs_buf``
  holds the last observation. The row is reset again from its own seed when headrace asks for its next episode.

What cannot hold: PhysX keeps contacts and solver state that ``get_state`` does not give, so a row that was put back
goes on nearly, not bit for bit, as it would have; and randomness comes from one generator for all rows, so episodes
are no functions of their seeds (``reseeds`` is False, and ``evaluate`` asks for ``batching="fast"``). Run
``headrace.testing.check_env`` on the bridged environment before you trust more than that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_SKIPPED = {"torch", "numpy", "builtins", "omni", "carb", "pxr", "logging", "isaacsim", "types"}


def make(num_envs: int, task: str, device: str = "cuda:0", instruction: str = "", success: str | None = None) -> Any:
    """A registered task; ``success`` is the termination term that means success."""
    from isaaclab.app import AppLauncher  # pyright: ignore[reportMissingImports]

    app = AppLauncher(headless=True).app  # before anything else of Isaac Lab is imported
    return IsaacLabRows(app, num_envs, task, device, instruction, success)


class IsaacLabRows:
    """A ``ManagerBasedRLEnv`` whose rows can be reset, saved and put back."""

    reseeds = False
    no_identity = "Isaac Lab draws from one generator for all rows, and PhysX keeps state that is not saved"

    def __init__(self, app: Any, num_envs: int, task: str, device: str, instruction: str, success: str | None) -> None:
        import gymnasium
        import isaaclab_tasks  # noqa: F401  # pyright: ignore[reportMissingImports]  # registers
        import torch
        from isaaclab_tasks.utils import parse_env_cfg  # pyright: ignore[reportMissingImports]

        self._app, self._torch = app, torch
        self.name, self.num_envs, self.device = task, num_envs, device
        cfg = parse_env_cfg(task, device=device, num_envs=num_envs)
        cfg.recorders = _last_observations()
        self._env: Any = gymnasium.make(task, cfg=cfg).unwrapped
        self._instruction, self._success = instruction, success
        self.observation_space = self._env.single_observation_space
        self.action_space = self._env.single_action_space
        self._env.reset()
        self._places, self._rings = _find_rows(self._env, num_envs, torch.Tensor)

    def reset_rows(self, ids: Any, seeds: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode in some rows; the others are put back, since a reset also advances their histories."""
        others = np.ones(self.num_envs, np.bool_)
        others[ids] = False
        saved = self.save_rows(others)
        self._torch.manual_seed(int(seeds[0]))
        obs, _ = self._env.reset(env_ids=self._torch.as_tensor(ids, device=self.device))
        self.restore_rows(others, saved)
        return obs, {"instruction": self._instruction}

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Advance every row; where an episode ended, its last observation is what the recorder term kept."""
        env = self._env
        obs, reward, terminated, truncated, _ = env.step(self._torch.as_tensor(actions, device=self.device))
        ended = (terminated | truncated).nonzero().flatten()
        if len(ended):
            last = env.recorder_manager._terms["last_observations"].obs
            obs = _merged(obs, last, ended)
        info = {} if self._success is None else {"success": env.termination_manager.get_term(self._success)}
        return obs, reward, terminated, truncated, info

    def save_rows(self, mask: Any) -> dict[str, Any]:
        """The scene's own state, and the rows of every tensor and ring of the managers."""
        ids = self._ids(mask)
        rings = [
            None if ring._buffer is None else ring._buffer[self._slots(ring)[:, None], ids] for ring in self._rings
        ]
        return {
            "scene": _mapped(self._env.scene.get_state(is_relative=False), lambda part: part[ids].clone()),
            "rows": [_value(owner, key)[ids].clone() for owner, key in self._places],
            "rings": rings,
        }

    def restore_rows(self, mask: Any, saved: dict[str, Any]) -> None:
        """Put rows back: managers first, then physics, whose writes also refresh the buffers of the assets."""
        ids = self._ids(mask)
        for (owner, key), rows in zip(self._places, saved["rows"], strict=True):
            _value(owner, key)[ids] = rows
        for ring, rows in zip(self._rings, saved["rings"], strict=True):
            if rows is not None:
                ring._buffer[self._slots(ring)[:, None], ids] = rows
        self._env.scene.reset_to(saved["scene"], env_ids=ids, is_relative=False)

    def close(self) -> None:
        """Release the environment and the application."""
        self._env.close()
        self._app.close()

    def _ids(self, mask: Any) -> Any:
        return self._torch.as_tensor(np.flatnonzero(mask), device=self.device)

    def _slots(self, ring: Any) -> Any:
        """Where the frames of a ring lie, from the newest to the oldest: the slots move with every step."""
        ages = self._torch.arange(ring.max_length, device=self.device)
        return self._torch.remainder(ring._pointer - ages, ring.max_length)


def _last_observations() -> Any:
    """The configuration of a recorder that keeps the observation before a reset and writes no file."""
    from isaaclab.managers import RecorderTerm, RecorderTermCfg  # pyright: ignore[reportMissingImports]
    from isaaclab.managers.recorder_manager import (  # pyright: ignore[reportMissingImports]
        DatasetExportMode,
        RecorderManagerBaseCfg,
    )
    from isaaclab.utils import configclass  # pyright: ignore[reportMissingImports]

    class LastObservations(RecorderTerm):
        obs: Any = None

        def record_pre_reset(self, env_ids: Any) -> tuple[None, None]:
            del env_ids  # all rows are kept
            self.obs = _mapped(self._env.obs_buf, lambda part: part.clone())
            return None, None

    @configclass
    class Recorders(RecorderManagerBaseCfg):
        dataset_export_mode = DatasetExportMode.EXPORT_NONE
        last_observations = RecorderTermCfg(class_type=LastObservations)

    return Recorders()


def _find_rows(root: Any, count: int, tensor: type) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """Every place (owner, key) of a tensor with ``count`` rows below ``root``, and every ring of a history."""
    places: list[tuple[Any, Any]] = []
    rings: list[Any] = []
    seen: set[int] = set()
    stack: list[Any] = [root]
    while stack:
        owner = stack.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        ring = type(owner).__name__ == "CircularBuffer"
        rings += [owner] if ring else []
        items = (
            owner.items()
            if isinstance(owner, dict)
            else enumerate(owner)
            if isinstance(owner, list)
            else vars(owner).items()
        )
        for key, value in list(items):
            if isinstance(value, tensor):
                if value.shape[:1] == (count,) and value.stride(0) and not (ring and key == "_buffer"):
                    places.append((owner, key))
            elif isinstance(value, (dict, list)) or (
                hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _SKIPPED
            ):
                stack.append(value)
    return places, rings


def _value(owner: Any, key: Any) -> Any:
    return owner[key] if isinstance(owner, (dict, list)) else getattr(owner, key)


def _mapped(value: Any, change: Any) -> Any:
    return {key: _mapped(part, change) for key, part in value.items()} if isinstance(value, dict) else change(value)


def _merged(obs: Any, last: Any, rows: Any) -> Any:
    if isinstance(obs, dict):
        return {key: _merged(part, last[key], rows) for key, part in obs.items()}
    merged = obs.clone()
    merged[rows] = last[rows]
    return merged
