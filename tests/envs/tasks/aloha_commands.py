"""Makes ``aloha_commands.npz``: scripted episodes and poses for gym-aloha and for ours. Its output is committed.

``python tests/envs/tasks/aloha_commands.py``. Episodes of the transfer are the expert's; those of the insertion are of
a law of the same parts: both arms pick up, lift, and put the peg into the socket.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import headrace
from headrace import rng
from headrace.imitation.experts._arm import (
    _ahead,
    _from_left,
    _from_right,
    _towards,
    aloha_expert,
    in_gripper,
    joints_for,
    pinch_place,
)
from headrace.types import Obs

EPISODES, STEPS, STATES = 2, 105, 300
ARM = 7
START = torch.tensor([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.1] * 2)


def insertion_law(obs: Obs) -> Tensor:
    """Not an expert: it does what it can with the parts of one."""
    state = obs["policy"].to(torch.float64)
    peg, socket = state[:, 14:17], state[:, 21:24]
    right = _hold(state[:, ARM : 2 * ARM], peg, _from_right, 0.42)
    left = _hold(state[:, :ARM], socket, _from_left, 0.70)
    lifted = (peg[:, 2] > 0.2) & (socket[:, 2] > 0.2)
    gap = torch.where(lifted, 0.5 * ((peg - socket)[:, 0] - 0.02), 0.13).clamp(0.0, 0.13)
    meet = torch.tensor([0.0, 0.5, 0.26], dtype=torch.float64).expand_as(peg)
    aside = torch.zeros_like(meet)
    aside[:, 0] = gap
    return torch.cat((left(meet - aside), right(meet + aside)), dim=1).to(torch.float32)


def _hold(arm: Tensor, thing: Tensor, frame: Callable[[Tensor], Tensor], narrow: float) -> Callable[[Tensor], Tensor]:
    joints, opening = arm[:, :6], arm[:, 6]
    seen, hand = frame(thing), pinch_place(joints)
    farthest = in_gripper(seen, joints).abs().amax(dim=1)
    inside = farthest < torch.where(opening < narrow, 0.03, 0.015)
    held = inside & (opening < narrow)
    aside = torch.linalg.vector_norm((seen - hand)[:, :2], dim=1)
    rise = torch.where(opening > 0.85, (4.0 * (aside - 0.01)).clamp(0.0, 0.08), 0.08)
    over = torch.stack((seen[:, 0], seen[:, 1], seen[:, 2] + torch.where(inside, 0.0, rise)), dim=1)

    def command(place: Tensor) -> Tensor:
        wanted = torch.where(held[:, None], hand + (frame(place) - seen), over)
        gripper = torch.where(inside, 0.0, 1.0)
        return torch.cat((_towards(joints, joints_for(_ahead(hand, wanted), 0.5, 0.0)), gripper[:, None]), dim=1)

    return command


def scripted(task: str, law: Callable[[Obs], Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Poses of the objects (E, 7 or 14), and actions (E, T, 14), float64."""
    env = headrace.make(task, EPISODES, seed=11, autoreset="disabled", threads=1)
    obs, _ = env.reset()
    poses = env.rows().get("qpos")[:, 16:].numpy()
    played: list[Tensor] = []
    for _ in range(STEPS):
        actions = law(obs)
        played.append(torch.where(env.active[:, None], actions, START))
        step = env.step(played[-1])
        obs = step.obs
    print(task, "successes:", int((~env.active).sum()), "of", EPISODES)
    env.close()
    return poses, torch.stack(played, 1).double().numpy()


def placed(task: str) -> np.ndarray:
    """Joint positions (n, nq) with objects in, beside and between hands, on the table, and in each other."""
    env = headrace.make(task, STATES, seed=12, threads=1)
    env.reset()
    ids, qpos = torch.arange(STATES), env.rows().get("qpos").clone()
    chance = rng.uniform(12, ids, "kind", 4)
    shift = rng.normal(12, ids, "shift", 6, std=0.012)
    wider = rng.uniform(12, ids, "fingers", 2, low=0.035, high=0.057)
    for arm, (frame, sign) in enumerate(((_from_left, 1.0), (_from_right, -1.0))):
        meet = torch.tensor([0.02 * -sign, 0.5, 0.25], dtype=torch.float64).expand(STATES, 3)
        joints = joints_for(frame(meet + 0.3 * shift[:, :3]), 0.2, 0.0)
        qpos[:, 8 * arm : 8 * arm + 6] = torch.where(chance[:, arm, None] < 0.7, joints, qpos[:, 8 * arm : 8 * arm + 6])
        qpos[:, 8 * arm + 6] = wider[:, arm]
        qpos[:, 8 * arm + 7] = -wider[:, arm]
    objects = (qpos.shape[1] - 16) // 7
    for index in range(objects):
        at = slice(16 + 7 * index, 19 + 7 * index)
        middle = torch.tensor([0.04 * (1 - 2 * index) * (objects - 1), 0.5, 0.25], dtype=torch.float64)
        held = middle + shift[:, 3 * index : 3 * index + 3]
        down = qpos[:, at].clone()
        down[:, 2] = 0.01 + 0.015 * chance[:, 3]
        lifted = chance[:, 2 + index, None] < 0.75
        qpos[:, at] = torch.where(lifted, held, down)
        # turned a little: MuJoCo 3.8 misses boxes that are parallel to the last bit and deep in each other
        turn = torch.cat((torch.ones(STATES, 1), 0.05 * rng.normal(12, ids, "turn", 3, draw=3 * index)), dim=1)
        turn = turn / torch.linalg.vector_norm(turn, dim=1, keepdim=True)
        qpos[:, at.stop : at.stop + 4] = torch.where(lifted, turn, qpos[:, at.stop : at.stop + 4])
    env.close()
    return qpos.numpy()


def main() -> None:
    """Write the file."""
    found: dict[str, np.ndarray] = {}
    for name, law in (("transfer_cube", aloha_expert), ("insertion", insertion_law)):
        task = f"aloha-{name.replace('_', '-')}-state"
        found[f"{name}/poses"], found[f"{name}/actions"] = scripted(task, law)
        found[f"{name}/states"] = placed(task)
    np.savez_compressed(Path(__file__).parent / "aloha_commands.npz", **found)


if __name__ == "__main__":
    main()
