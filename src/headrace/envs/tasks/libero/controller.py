"""OSC_POSE over rows: torques of environments between two physics steps. ``plain.PoseController`` is the reference."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace._kernels.compiled import helper, kernel
from headrace.envs._episode_state import F64, I64


class ArmConstants(NamedTuple):
    """What does not change: the layout of a model, gains and limits, and what the controller has read at reset."""

    joints: I64
    columns: I64
    dofs: I64
    mass_at: I64
    """(7, 7): where the inertia of two joints is in a row of ``M``."""
    site: int
    motors: I64
    grippers: I64
    grip_center: F64
    grip_half: F64
    home: F64
    low: F64
    high: F64
    gains: tuple[float, float, float]
    """kp, kd, kp of the nullspace."""
    scale: tuple[float, float]
    """What an action of 1 means: m, rad."""
    speed: float
    """Of the gripper's command, per physics step."""
    mass0: F64
    jac0: F64
    pos0: F64
    mat0: F64


class ArmFields(NamedTuple):
    """Live arrays of all N environments, of the simulation and of the task's memory."""

    mass: F64
    anchor: F64
    axis: F64
    site_pos: F64
    site_mat: F64
    bias: F64
    qpos: F64
    qvel: F64
    ctrl: F64
    action: F64
    goal_pos: F64
    goal_ori: F64
    grip: F64
    started: F64
    """(N, 1): 0 before the first physics step of an episode."""


@helper
def invert(source: F64) -> F64:
    """Invert a small matrix by elimination with pivots."""
    n = source.shape[0]
    work = np.zeros((n, 2 * n))
    for i in range(n):
        for j in range(n):
            work[i, j] = source[i, j]
        work[i, n + i] = 1.0
    for c in range(n):
        pivot = c
        for r in range(c + 1, n):
            if abs(work[r, c]) > abs(work[pivot, c]):
                pivot = r
        for j in range(2 * n):
            work[c, j], work[pivot, j] = work[pivot, j], work[c, j]
        factor = 1.0 / work[c, c]
        for j in range(2 * n):
            work[c, j] *= factor
        for r in range(n):
            if r != c:
                factor = work[r, c]
                for j in range(2 * n):
                    work[r, j] -= factor * work[c, j]
    return work[:, n:].copy()


@helper
def multiply(a: F64, b: F64) -> F64:
    """Multiply two matrices in one order of sums."""
    out = np.zeros((a.shape[0], b.shape[1]))
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            for k in range(a.shape[1]):
                out[i, j] += a[i, k] * b[k, j]
    return out


@helper
def apply(a: F64, v: F64) -> F64:
    """Multiply a matrix with a vector in one order of sums."""
    out = np.zeros(a.shape[0])
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            out[i] += a[i, k] * v[k]
    return out


@helper
def rotate(x: float, y: float, z: float, mat: F64, out: F64) -> None:
    """Turn ``mat`` (3, 3) by an axis-angle vector that is not 0, rounded as ``plain.rotation`` is, into ``out``."""
    angle = np.sqrt(x * x + y * y + z * z)
    s = np.sin(angle / 2.0) / angle
    qw, qx = np.float32(np.cos(angle / 2.0)), np.float32(x * s)
    qy, qz = np.float32(y * s), np.float32(z * s)
    f = np.sqrt(2.0 / np.float64(np.float32(qw * qw + qx * qx + qy * qy + qz * qz)))
    qw, qx, qy, qz = np.float32(qw * f), np.float32(qx * f), np.float32(qy * f), np.float32(qz * f)
    turn = np.empty((3, 3))
    turn[0, 0] = 1.0 - np.float64(qy * qy) - np.float64(qz * qz)
    turn[1, 1] = 1.0 - np.float64(qx * qx) - np.float64(qz * qz)
    turn[2, 2] = 1.0 - np.float64(qx * qx) - np.float64(qy * qy)
    turn[0, 1], turn[1, 0] = qx * qy - qz * qw, qx * qy + qz * qw
    turn[2, 0], turn[0, 2] = qx * qz - qy * qw, qx * qz + qy * qw
    turn[1, 2], turn[2, 1] = qy * qz - qx * qw, qy * qz + qx * qw
    out[:] = multiply(turn, mat)


@kernel(checked_division=False)
def control_arms(ids: I64, first: bool, arm: ArmConstants, fields: ArmFields) -> None:
    """Write the controls of ``ids`` (n,) for the next physics step.

    Outputs: rows of ``ctrl``, ``grip`` and ``started``, and with ``first``, before a step's first, of the goals.
    """
    kp, kd, null_kp = arm.gains
    null_kd = 2.0 * np.sqrt(null_kp)
    for row in range(ids.shape[0]):
        e = ids[row]
        action, goal_pos, goal_ori = fields.action[e], fields.goal_pos[e], fields.goal_ori[e].reshape(3, 3)
        mass, jac, pos, mat = arm.mass0, arm.jac0, arm.pos0, arm.mat0
        q, v = arm.home, np.zeros(7)
        if fields.started[e, 0] != 0.0:
            mass, jac, q = np.empty((7, 7)), np.empty((6, 7)), np.empty(7)
            pos, mat = fields.site_pos[e, arm.site].copy(), fields.site_mat[e, arm.site].copy().reshape(3, 3)
            for i in range(7):
                q[i], v[i] = fields.qpos[e, arm.columns[i]], fields.qvel[e, arm.dofs[i]]
                for j in range(7):
                    mass[i, j] = fields.mass[e, arm.mass_at[i, j]]
                a, anchor = fields.axis[e, arm.joints[i]], fields.anchor[e, arm.joints[i]]
                x, y, z = pos[0] - anchor[0], pos[1] - anchor[1], pos[2] - anchor[2]
                jac[0, i], jac[1, i], jac[2, i] = a[1] * z - a[2] * y, a[2] * x - a[0] * z, a[0] * y - a[1] * x
                jac[3, i], jac[4, i], jac[5, i] = a[0], a[1], a[2]
        fields.started[e, 0] = 1.0
        if first:
            turn = np.empty(3)
            for i in range(3):
                goal_pos[i] = pos[i] + arm.scale[0] * min(max(action[i], -1.0), 1.0)
                turn[i] = arm.scale[1] * min(max(action[3 + i], -1.0), 1.0)
            if turn[0] != 0.0 or turn[1] != 0.0 or turn[2] != 0.0:
                rotate(turn[0], turn[1], turn[2], mat, goal_ori)
        speed = apply(jac, v)
        wanted = np.zeros(6)
        for c in range(3):
            wanted[c] = kp * (goal_pos[c] - pos[c]) - kd * speed[c]
            wanted[3] += 0.5 * (mat[1, c] * goal_ori[2, c] - mat[2, c] * goal_ori[1, c])
            wanted[4] += 0.5 * (mat[2, c] * goal_ori[0, c] - mat[0, c] * goal_ori[2, c])
            wanted[5] += 0.5 * (mat[0, c] * goal_ori[1, c] - mat[1, c] * goal_ori[0, c])
        for c in range(3):
            wanted[3 + c] = kp * wanted[3 + c] - kd * speed[3 + c]
        jac_inverse = multiply(jac, invert(mass))
        full = multiply(jac_inverse, jac.T)
        wrench = np.empty(6)
        wrench[:3] = apply(invert(full[:3, :3]), wanted[:3])
        wrench[3:] = apply(invert(full[3:, 3:]), wanted[3:])
        rest = apply(mass, null_kp * (arm.home - q) - null_kd * v)
        # the nullspace's transpose times rest is rest less J^T lambda (J M^-1) rest
        wrench -= apply(invert(full), apply(jac_inverse, rest))
        torque = apply(jac.T, wrench)
        for i in range(7):
            total = torque[i] + fields.bias[e, arm.dofs[i]] + rest[i]
            fields.ctrl[e, arm.motors[i]] = min(max(total, arm.low[i]), arm.high[i])
        for i in range(2):
            moved = fields.grip[e, i] + (-1.0 if i == 0 else 1.0) * arm.speed * np.sign(action[6])
            fields.grip[e, i] = min(max(moved, -1.0), 1.0)
            fields.ctrl[e, arm.grippers[i]] = arm.grip_center[i] + arm.grip_half[i] * fields.grip[e, i]
