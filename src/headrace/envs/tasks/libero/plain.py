"""One LIBERO environment at a time in plain numpy, in any MuJoCo: the reference of the kernels, and of other versions.

Runs alone in an interpreter with mujoco and numpy. What is mirrored of robosuite 1.4.0:

- 20 Hz, 25 physics steps of 2 ms; torques are computed anew before each;
- the goal is relative to where the grip site is; its orientation is kept where the rotation of an action is 0, and
  rotations are rounded to float32;
- in the first physics step after an initial state the controller still has pose, Jacobian and inertia of the reset;
- the command of the gripper is state;
- observations are early: derived fields before physics step 23, the gripper's positions before step 24; success reads
  derived fields before step 24 and joints after it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SUBSTEPS = 25
FORWARDS = 2
"""How often robosuite computes forces before each physics step."""
LOOK, GRIP = 23, 24
"""Physics steps before which poses and the gripper's positions are observed."""
NULL_KP = 10.0
WAIT = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
"""The action of waiting steps."""
ARM = 7
_NEAR, _LOWER, _HIGHER, _BELOW = 0.03, 0.005, 0.10, 0.01
"""LIBERO's margins, m: of On an object, of On a site (two), of In a site."""


def goal_reached(
    goal: Sequence[Mapping[str, Any]], ids: Mapping[str, int], places: tuple[Any, Any, Any], qpos: Any, touch: Any
) -> Any:
    """Evaluate LIBERO's goal predicates.

    Args:
        goal: predicates as exported.
        ids: name of a body or site → its index, name of a joint → its column of qpos.
        places: of bodies (n, bodies, 3), of sites (n, sites, 3) and the latter's matrices (n, sites, 9).
        qpos: float64 (n, nq).
        touch: bool (n, predicates that need contacts).

    Returns:
        bool (n,): whether all hold.
    """
    xpos, site_pos, site_mat = places
    held, contacts = np.ones(len(qpos), bool), 0
    for one in goal:
        kind = one["kind"]
        if kind in ("in-site", "on-site"):
            place, site, size = xpos[:, ids[one["body"]]], ids[one["site"]], np.array(one["size"])
            center, turn = site_pos[:, site], site_mat[:, site].reshape(-1, 3, 3)
            if kind == "in-site":
                half = np.abs((turn * size).sum(axis=2))
                low, high = center - half, center + half
                low[:, 2] -= _BELOW
                held &= (place > low).all(axis=1) & (place < high).all(axis=1)
            else:
                away = (turn * (place - center)[:, None]).sum(axis=2)
                held &= (size[2] - _LOWER < away[:, 2]) & (away[:, 2] < size[2] + _HIGHER)
                held &= (np.abs(away[:, :2]) < size[:2]).all(axis=1)
        elif kind == "on-object":
            place, other = xpos[:, ids[one["body"]]], xpos[:, ids[one["other"]]]
            apart = place[:, :2] - other[:, :2]
            held &= (other[:, 2] <= place[:, 2]) & (np.sqrt((apart * apart).sum(axis=1)) < _NEAR)
        else:
            each = qpos[:, [ids[joint] for joint in one["joints"]]]
            compare = {(True, True): np.greater_equal, (True, False): np.greater, (False, True): np.less_equal}
            passed = compare.get((one["above"], one["inclusive"]), np.less)(each, one["bound"])
            held &= passed.all(axis=1) if one["all"] else passed.any(axis=1)
        if one.get("touch"):
            held &= touch[:, contacts]
            contacts += 1
    return held


def rotation(vector: Any) -> Any:
    """Return the matrix (3, 3) of an axis-angle vector as robosuite rounds it."""
    angle = np.sqrt((vector * vector).sum())
    q = np.array([np.cos(angle / 2), *(vector * (np.sin(angle / 2) / angle))]).astype(np.float32)
    q = (q.astype(np.float64) * np.sqrt(2.0 / float((q * q).sum()))).astype(np.float32)
    p = np.outer(q, q)  # products and their differences are float32, one less a product is not
    w, x, y, z = range(4)
    turn = np.empty((3, 3))
    for i, (a, b) in enumerate(((y, z), (x, z), (x, y))):
        turn[i, i] = 1.0 - float(p[a, a]) - float(p[b, b])
    for i, j, a, b, c in ((0, 1, x, y, z), (2, 0, x, z, y), (1, 2, y, z, x)):
        turn[i, j], turn[j, i] = p[a, b] - p[c, w], p[a, b] + p[c, w]
    return turn


def axis_angle(quat: Any) -> Any:
    """Return axis-angle vectors (n, 3) of quaternions xyzw (n, 4), without taking the shorter of two turns."""
    w = np.clip(quat[:, 3], -1.0, 1.0)
    den = np.sqrt(1.0 - w * w)
    scale = np.where(den > 0, 2.0 * np.arccos(w) / np.where(den > 0, den, 1.0), 0.0)
    return quat[:, :3] * scale[:, None]


def _mujoco() -> Any:
    """Import MuJoCo, of whatever version."""
    return importlib.import_module("mujoco")


class PandaLayout:
    """Where the robot of robosuite is in a model."""

    def __init__(self, model: Any) -> None:
        joints = [model.joint(f"robot0_joint{i}") for i in range(1, ARM + 1)]
        self.joints = np.array([joint.id for joint in joints])
        self.columns = np.array([int(model.jnt_qposadr[i]) for i in self.joints])
        self.dofs = np.array([int(model.jnt_dofadr[i]) for i in self.joints])
        self.site = int(model.site("gripper0_grip_site").id)
        self.hand = int(model.body("robot0_right_hand").id)
        fingers = [model.joint(f"gripper0_finger_joint{i}").id for i in (1, 2)]
        self.fingers = np.array([int(model.jnt_qposadr[i]) for i in fingers])
        self.motors = np.array([int(model.actuator(f"robot0_torq_j{i}").id) for i in range(1, ARM + 1)])
        self.grippers = np.array([int(model.actuator(f"gripper0_gripper_finger_joint{i}").id) for i in (1, 2)])
        span = np.array(model.actuator_ctrlrange[self.grippers])
        self.grip_center, self.grip_half = 0.5 * (span[:, 1] + span[:, 0]), 0.5 * (span[:, 1] - span[:, 0])


def named_ids(model: Any, record: Mapping[str, Any]) -> dict[str, int]:
    """Return the indices of what a goal names, as :func:`goal_reached` takes them."""
    found: dict[str, int] = {}
    for one in record["goal"]:
        for key in ("body", "other"):
            if key in one:
                found[one[key]] = int(model.body(one[key]).id)
        if "site" in one:
            found[one["site"]] = int(model.site(one["site"]).id)
        for joint in one.get("joints", ()):
            found[joint] = int(model.jnt_qposadr[model.joint(joint).id])
    return found


class PoseController:
    """OSC_POSE with fixed gains: uncoupled position and orientation, nullspace towards home."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.kp, self.kd = settings["kp"], settings["kd"]
        self.scale = np.repeat(settings["output"], 3)
        self.home = np.array(settings["home"])
        self.low, self.high = (np.array(limit) for limit in settings["torques"])
        self.goal_pos, self.goal_ori = np.zeros(3), np.eye(3)

    def set_goal(self, action: Any, pos: Any, mat: Any) -> None:
        """Take an action (6,), relative to the pose of the grip site."""
        delta = np.clip(action[:6], -1.0, 1.0) * self.scale
        self.goal_pos = pos + delta[:3]
        if delta[3:].any():
            self.goal_ori = rotation(delta[3:]) @ mat

    def torques(self, arm: tuple[Any, ...], bias: Any) -> Any:
        """Return the torques (7,) from what :func:`seen_arm` returns and bias forces (7,)."""
        mass, jac, pos, mat, q, v = arm
        speed = jac @ v
        force = self.kp * (self.goal_pos - pos) - self.kd * speed[:3]
        error = 0.5 * sum(np.cross(mat[:, i], self.goal_ori[:, i]) for i in range(3))
        torque = self.kp * error - self.kd * speed[3:]
        inverse = np.linalg.inv(mass)
        full = jac @ inverse @ jac.T
        wrench = np.concatenate([np.linalg.inv(full[:3, :3]) @ force, np.linalg.inv(full[3:, 3:]) @ torque])
        null = np.eye(ARM) - inverse @ jac.T @ np.linalg.inv(full) @ jac
        rest = mass @ (NULL_KP * (self.home - q) - 2 * np.sqrt(NULL_KP) * v)
        return np.clip(jac.T @ wrench + bias + null.T @ rest, self.low, self.high)


def seen_arm(model: Any, data: Any, at: PandaLayout) -> tuple[Any, ...]:
    """Return what the controller reads of a simulation: inertia, Jacobian, pose of the grip site, joints."""
    mujoco = _mujoco()
    full, jac = np.zeros((model.nv, model.nv)), np.zeros((6, model.nv))
    if hasattr(data, "qM"):
        mujoco.mj_fullM(model, full, data.qM)
    else:  # MuJoCo 4
        mujoco.mj_fullM(model, data, full)
    mujoco.mj_jacSite(model, data, jac[:3], jac[3:], at.site)
    pose = np.array(data.site_xpos[at.site]), np.array(data.site_xmat[at.site]).reshape(3, 3)
    joints = np.array(data.qpos[at.columns]), np.array(data.qvel[at.dofs])
    return (full[np.ix_(at.dofs, at.dofs)], jac[:, at.dofs], *pose, *joints)


def reset_arm(model: Any, at: PandaLayout, home: Any) -> tuple[Any, ...]:
    """Return what the controller has read at LIBERO's reset: the arm at home, at rest."""
    mujoco = _mujoco()
    data = mujoco.MjData(model)
    data.qpos[at.columns] = home
    mujoco.mj_forward(model, data)
    return seen_arm(model, data, at)


class PlainLibero:
    """One environment. ``model`` is compiled from the exported XML, with the exported colors.

    ``forwards``: how often forces are computed before each physics step beside the step's own computation. robosuite
    does it twice. The solver stops at a tolerance and begins at its last solution: for the same states to the last
    digits, it must have begun as often.
    """

    def __init__(self, model: Any, record: Mapping[str, Any], forwards: int = 0) -> None:
        self._mujoco = _mujoco()
        self.model, self.data, self.record, self.at = model, self._mujoco.MjData(model), record, PandaLayout(model)
        self.controller = PoseController(record["controller"])
        self._start = reset_arm(model, self.at, self.controller.home)
        self._ids = named_ids(model, record)
        self._geoms = [self._touching(one["touch"]) for one in record["goal"] if one.get("touch")]
        self._fresh, self._grip, self._forwards = True, np.zeros(2), forwards
        self.seen: dict[str, Any] = {}
        """What was observed last: ``eef_pos`` (3,), ``eef_quat`` (4,) xyzw, ``gripper_qpos`` (2,), ``qpos`` (nq,)."""

    def reset(self, state: Any, fixtures: Mapping[str, Any]) -> None:
        """Begin with an initial state (1 + nq + nv,) and poses (7,) of fixtures by body."""
        for body, pose in fixtures.items():
            at = self.model.body(body).id
            self.model.body_pos[at], self.model.body_quat[at] = pose[:3], pose[3:]
        self._mujoco.mj_resetData(self.model, self.data)
        nq = self.model.nq
        self.data.time, self.data.qpos[:], self.data.qvel[:] = state[0], state[1 : 1 + nq], state[1 + nq :]
        self._mujoco.mj_forward(self.model, self.data)
        self.controller.goal_pos, self.controller.goal_ori = self._start[2].copy(), self._start[3].copy()
        self._fresh, self._grip = True, np.zeros(2)
        self._look()
        self.seen["gripper_qpos"] = np.array(self.data.qpos[self.at.fingers])

    def step(self, action: Any) -> bool:
        """Take a step with an action (7,); returns whether the goal is reached."""
        data, at = self.data, self.at
        speed = self.record["controller"]["gripper_speed"] * np.sign(action[6])
        for index in range(SUBSTEPS):
            for _ in range(self._forwards):
                self._mujoco.mj_forward(self.model, data)
            self._mujoco.mj_step1(self.model, data)
            if index == LOOK:
                self._look()
            if index == GRIP:
                self.seen["gripper_qpos"] = np.array(data.qpos[at.fingers])
            arm = self._start if self._fresh else seen_arm(self.model, data, at)
            if index == 0:
                self.controller.set_goal(action, arm[2], arm[3])
            data.ctrl[at.motors] = self.controller.torques(arm, np.array(data.qfrc_bias[at.dofs]))
            self._fresh = False
            self._grip = np.clip(self._grip + np.array([-1.0, 1.0]) * speed, -1.0, 1.0)
            data.ctrl[at.grippers] = at.grip_center + at.grip_half * self._grip
            self._mujoco.mj_step2(self.model, data)
        return self.holds()

    def holds(self) -> bool:
        """Return whether the goal is reached, by the bodies and contacts that were computed last and the joints now."""
        data = self.data
        bodies, sites, turns = (np.array(part)[None] for part in (data.xpos, data.site_xpos, data.site_xmat))
        touch = np.array([[self._touches(*geoms) for geoms in self._geoms]], bool).reshape(1, -1)
        goal, joints = self.record["goal"], np.array(data.qpos)[None]
        return bool(goal_reached(goal, self._ids, (bodies, sites, turns), joints, touch)[0])

    def _look(self) -> None:
        data = self.data
        self.seen["eef_pos"] = np.array(data.site_xpos[self.at.site])
        self.seen["eef_quat"] = np.array(data.xquat[self.at.hand])[[1, 2, 3, 0]]
        self.seen["qpos"] = np.array(data.qpos)

    def _touching(self, touch: Mapping[str, Any]) -> tuple[set[int], set[int]]:
        """Return the geoms below two bodies, without those that LIBERO leaves out."""
        model, groups = self.model, list[set[int]]()
        for name, out in zip(touch["bodies"], touch["except"], strict=True):
            root, below = model.body(name).id, set[int]()
            for body in range(model.nbody):
                if body == root or model.body_parentid[body] in below:
                    below.add(body)
            geoms = {g for g in range(model.ngeom) if model.geom_bodyid[g] in below}
            groups.append(geoms - {model.geom(geom).id for geom in out})
        return groups[0], groups[1]

    def _touches(self, first: set[int], second: set[int]) -> bool:
        pairs = [(int(c.geom1), int(c.geom2)) for c in self.data.contact]
        return any((a in first and b in second) or (b in first and a in second) for a, b in pairs)


def soften_tables(model: Any) -> None:
    """Give things on tables and fixtures the forces of MuJoCo 3.3.2, where the depth of two flat boxes is half of it.

    Things of LIBERO that begin inside their table are thrown up by it, in MuJoCo 4 four times as high. Parameters of a
    contact are the mean of both geoms', and those of all things are equal: half of the stiffness is twice its mean.
    """
    if int(_mujoco().__version__.split(".")[0]) < 4:
        return
    fixed = model.body_weldid[model.geom_bodyid] == 0
    fixed &= model.geom_type == int(_mujoco().mjtGeom.mjGEOM_BOX)
    model.geom_solref[fixed, 1] = np.sqrt(2.0) * (model.geom_solref[fixed, 1] + 1.0) - 1.0
    model.geom_solimp[fixed, 2] = 2.0 * model.geom_solimp[fixed, 2] + 0.001


def load_plain(path: str, forwards: int = 0) -> tuple[PlainLibero, Any]:
    """Read an exported file; returns the environment and its arrays by name."""
    with np.load(path) as data:
        arrays = dict(data)
    model = _mujoco().MjModel.from_xml_string(str(arrays["xml"]))
    model.site_rgba[:], model.geom_rgba[:] = arrays["site_rgba"], arrays["geom_rgba"]
    soften_tables(model)
    return PlainLibero(model, json.loads(str(arrays["record"])), forwards), arrays
