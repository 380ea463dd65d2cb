"""Writes what the genuine gym-aloha does, for our tests to compare with; ``make test-aloha`` runs it in .venv-aloha.

``python tests/envs/tasks/aloha_reference.py OUTPUT`` plays the commands of ``aloha_commands.npz`` without rendering,
sets its poses, and writes joint positions and stages of the reward. It imports nothing of ours.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

TASKS = ("transfer_cube", "insertion")
COMMANDS = Path(__file__).parent / "aloha_commands.npz"


def genuine(task: str) -> Any:
    """The environment of dm-control inside gym-aloha's, which draws nothing."""
    env: Any = importlib.import_module("gym_aloha.env").AlohaEnv(task, obs_type="pixels_agent_pos")
    inner = env._env
    inner.physics.render = lambda **_: np.zeros((1, 1, 3), np.uint8)
    return inner


def play(env: Any, poses: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One episode from ``poses`` of the objects: qpos (T, nq), observations (T, 14), rewards (T,)."""
    importlib.import_module("gym_aloha.tasks.sim").BOX_POSE[0] = poses
    env.reset()
    rows: list[tuple[np.ndarray, np.ndarray, float]] = []
    for action in actions:
        step = env.step(action)
        rows.append((env.physics.data.qpos.copy(), step.observation["qpos"], float(step.reward)))
    qpos, observed, rewards = zip(*rows, strict=True)
    return np.stack(qpos), np.stack(observed), np.array(rewards)


def judge(env: Any, states: np.ndarray) -> np.ndarray:
    """The stage of the reward at joint positions (n, nq)."""
    stages: list[float] = []
    for state in states:
        with env.physics.reset_context():
            env.physics.data.qpos[:] = state
        stages.append(float(env.task.get_reward(env.physics)))
    return np.array(stages)


def main() -> None:
    """Write the reference."""
    given = np.load(COMMANDS)
    found: dict[str, np.ndarray] = {"mujoco": np.array(importlib.import_module("mujoco").__version__)}
    for task in TASKS:
        env = genuine(task)
        for episode, (poses, actions) in enumerate(zip(given[f"{task}/poses"], given[f"{task}/actions"], strict=True)):
            names = (f"{task}/{episode}/{what}" for what in ("qpos", "observed", "rewards"))
            found |= dict(zip(names, play(env, poses, actions), strict=True))
        found[f"{task}/stages"] = judge(env, given[f"{task}/states"])
    np.savez_compressed(sys.argv[1], **found)


if __name__ == "__main__":
    main()
