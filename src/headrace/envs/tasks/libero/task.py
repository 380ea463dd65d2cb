"""The native LIBERO task: an exported scene, OSC_POSE between physics steps, LIBERO's goals."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from headrace.envs.image_spec import ImageSpec
from headrace.envs.task import Rows, Task, TaskCfg
from headrace.envs.tasks.libero.controller import ArmConstants, ArmFields, control_arms
from headrace.envs.tasks.libero.exported import ExportedTask, load_exported
from headrace.envs.tasks.libero.names import HORIZONS, check_perturbations, split_name
from headrace.envs.tasks.libero.plain import (
    ARM,
    GRIP,
    LOOK,
    NULL_KP,
    SUBSTEPS,
    WAIT,
    PandaLayout,
    axis_angle,
    goal_reached,
    named_ids,
    reset_arm,
)
from headrace.errors import ConfigError, UnknownNameError
from headrace.sim.camera.appearance import AppearanceSpec
from headrace.sim.camera.camera import CameraSpec
from headrace.sim.mujoco_api import mujoco
from headrace.types import Obs

CAMERAS = ("agentview", "robot0_eye_in_hand")
_STRAY, _ASIDE = 0.1, 0.01
"""How far joints of the arm, rad, and things, m, begin from the benchmark's initial state at most."""
_SYNONYMS = (("pick up", "grab"), ("put", "place"), ("turn on", "switch on"), ("turn off", "switch off"))
_FRAMES = ("{}", "please {}", "could you {}", "your task is to {}", "i want you to {}", "{} now")
STATE = 8
"""Numbers that policies read: place of the grip site, axis-angle of the hand, two fingers."""
_AWAY = 100.0
"""How far below its place, m, a burner is that is off: pictures show it nowhere."""
_FIELDS = ("M", "xanchor", "xaxis", "site_xpos", "site_xmat", "qfrc_bias", "qpos", "qvel", "ctrl")


@dataclass(frozen=True, kw_only=True)
class LiberoCfg(TaskCfg):
    """Settings of a task of LIBERO."""

    task: str
    """Suite and index: ``libero_spatial/0``."""
    decimation: int = SUBSTEPS
    episode_length: int = 0
    """Environment steps; 0 for the suite's horizon. Waiting steps do not count."""
    waits: int = 10
    """Steps with an open gripper before the first observation."""
    cameras: tuple[str, ...] = CAMERAS
    """An observation group each; none for states alone."""
    pixels: int = 256
    renderer: str = "native"
    """``native``, or ``gl`` for MuJoCo's own picture."""
    specular: bool = True
    """Native renderer: highlights, without which pictures differ visibly from LIBERO's."""
    shadows: bool = False
    reflections: bool = True
    """Native renderer: mirroring surfaces, such as the plates of stoves."""
    gripper: Literal["signed", "unit"] = "signed"
    """The last number of an action: ``signed`` closes where it is positive, ``unit`` in [0, 1] opens above 0.5."""
    protocol: str = ""
    """Name of the evaluation loop that the other settings are of: part of a table's identity, and nothing else."""
    perturb: tuple[str, ...] = ()
    """What differs from the benchmark, drawn from the episode's id: ``names.PERTURBATIONS``."""
    mujoco: str = ""
    """The version of MuJoCo that a table is of; "" for any. Another one than the installed is refused."""

    def __post_init__(self) -> None:
        suite, _ = split_name(self.task)
        if self.episode_length == 0:
            object.__setattr__(self, "episode_length", HORIZONS[suite])
        if self.decimation != SUBSTEPS:
            raise ConfigError(f"decimation: expected {SUBSTEPS}, as in LIBERO, got {self.decimation}")
        if self.waits < 0 or self.pixels < 1:
            raise ConfigError(f"waits, pixels: expected at least 0 and 1, got {self.waits} and {self.pixels}")
        check_perturbations(self.perturb)
        if self.gripper not in ("signed", "unit"):
            raise UnknownNameError("gripper", self.gripper, ("signed", "unit"))
        if self.mujoco not in ("", str(mujoco.__version__)):
            raise ConfigError(
                f"mujoco: expected the installed version {mujoco.__version__}, got {self.mujoco!r}; a table is played "
                "in one version"
            )
        super().__post_init__()


def perturbed_looks(camera: str, perturb: Sequence[str]) -> AppearanceSpec:
    """Return how far a camera's pictures stray from the model's; the one in the hand stays in its place."""
    moved = 0.05 if "camera" in perturb and camera != CAMERAS[1] else 0.0
    dimmed, tinted = 0.6 * ("light" in perturb), 0.3 * ("texture" in perturb)
    return AppearanceSpec(
        color=tinted, light=dimmed, light_direction=dimmed, camera_position=moved, camera_rotation=moved
    )


class Libero(Task[LiberoCfg]):
    """A Panda with OSC_POSE: six deltas in [-1, 1] for the hand, one number whose sign closes (+) or opens (-)."""

    success_measure = "LIBERO's goal predicates"
    controlled = True
    shown_positions = "shown"

    def __init__(self, cfg: LiberoCfg, exported: ExportedTask | None = None) -> None:
        """Load an exported task, or take it."""
        self.exported = load_exported(cfg.task) if exported is None else exported
        record = self.exported.record
        model = self.exported.compile(textures=bool(cfg.cameras))
        self._raw: Any = model
        images = {
            name: ImageSpec(
                camera=CameraSpec(
                    name=name,
                    width=cfg.pixels,
                    height=cfg.pixels,
                    shadows=cfg.shadows,
                    specular=cfg.specular,
                    reflections=cfg.reflections,
                    groups=(1, 2),  # robosuite hides shapes that only collide
                    site_groups=(0, 1, 2),
                ),
                renderer=cfg.renderer,
                looks=perturbed_looks(name, cfg.perturb),
            )
            for name in cfg.cameras
        }
        super().__init__(cfg, model, {"policy": STATE, "critic": 9 + model.nq}, images)
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)
        self.memory = {
            "action": (7,), "goal_pos": (3,), "goal_ori": (9,), "grip": (2,), "started": (1,),
            "seen": (9,), "shown": (model.nq,),
        }  # fmt: skip
        self._at = PandaLayout(self._raw)
        self._arm = _constants(self._raw, self._at, record)
        self._ids = named_ids(self._raw, record)
        self._fixtures = [self._raw.body(name).id for name in record["fixtures"]]
        burners = record["burners"]
        self._burners = [(self._raw.site(one["site"]).id, one) for one in burners]
        for site, _ in self._burners:
            self._raw.site_rgba[site, 3] = 1.0
        self._knobs = [int(self._raw.jnt_qposadr[self._raw.joint(one["joint"]).id]) for one in burners]
        free = self._raw.jnt_type == int(mujoco.mjtJoint.mjJNT_FREE)
        self._free = self._raw.jnt_qposadr[free].tolist()
        self._poses = torch.from_numpy(self.exported.fixtures)
        self._states = torch.from_numpy(self.exported.states)
        opened = WAIT[6] if cfg.gripper == "signed" else 1.0
        self._wait = torch.tensor((*WAIT[:6], opened), dtype=torch.float64)

    @property
    def identity(self) -> str:
        """What a snapshot must be of to be loaded into this task."""
        return f"{type(self).__name__}:{self.cfg.task}:{self.exported.record['digest']}"

    def reset(self, rows: Rows) -> None:
        """Take the initial state of the episode's id, and fixtures where one of LIBERO's own draws has them."""
        nq, states = self._raw.nq, self._states[rows.episode_ids % len(self._states)]
        rows.set("time", states[:, 0])
        rows.set("qpos", self._move(rows, states[:, 1 : 1 + nq]))
        rows.set("qvel", states[:, 1 + nq :])
        if self._fixtures:
            draw = (rows.uniform("fixtures", 1)[:, 0] * self._poses.shape[1]).to(torch.int64)
            pos, quat = rows.get_model("body_pos"), rows.get_model("body_quat")
            for body, poses in zip(self._fixtures, self._poses, strict=True):
                pos[:, body], quat[:, body] = poses[draw, :3], poses[draw, 3:]
            rows.set_model("body_pos", pos)
            rows.set_model("body_quat", quat)
        self._light(rows)
        rows.remember("goal_pos", torch.from_numpy(self._arm.pos0).expand(len(rows), -1))
        rows.remember("goal_ori", torch.from_numpy(self._arm.mat0.reshape(9)).expand(len(rows), -1))

    def settle(self, rows: Rows, advance: Callable[[Tensor], None]) -> None:
        """Look, and wait."""
        self._look(rows)
        self._look_at_fingers(rows)
        for _ in range(self.cfg.waits):
            advance(self._wait.expand(len(rows), -1))

    def apply_action(self, rows: Rows, actions: Tensor) -> None:
        """Keep the action for :meth:`control`; burners are lit as the last step left their knobs."""
        if self.cfg.gripper == "unit":
            actions = torch.cat((actions[:, :6], 1.0 - 2.0 * actions[:, 6:]), dim=1)
        rows.remember("action", actions)
        self._light(rows)

    def control(self, rows: Rows, index: int) -> None:
        """Write torques and the gripper's command; observe where robosuite does."""
        if index == LOOK:
            self._look(rows)
        elif index == GRIP:
            self._look_at_fingers(rows)
        fields = (*_FIELDS, "action", "goal_pos", "goal_ori", "grip", "started")
        control_arms(rows.ids.numpy(), index == 0, self._arm, ArmFields(*map(rows.live, fields)))

    def observe(self, rows: Rows) -> Obs:
        """``policy``: the state that policies read; ``critic``: the hand's quaternion instead, and all joints."""
        seen = rows.recall("seen")
        turn = torch.from_numpy(axis_angle(seen[:, 3:7].numpy()))
        return {
            "policy": torch.cat((seen[:, :3], turn, seen[:, 7:]), dim=1),
            "critic": torch.cat((seen, rows.recall("shown")), dim=1),
        }

    def reward(self, rows: Rows, actions: Tensor) -> Tensor:
        """1 in the step that reaches the goal."""
        del actions
        return self.terminated(rows).to(torch.float64)

    def terminated(self, rows: Rows) -> Tensor:
        """Return whether the goal is reached, as LIBERO: from bodies and contacts before the last physics step, and
        joints after it."""
        return rows.once("goal", lambda: self._goal(rows))

    def success(self, rows: Rows) -> Tensor:
        """Return whether the goal is reached."""
        return self.terminated(rows)

    def instructions(self, rows: Rows) -> Sequence[str]:
        """Return the benchmark's words, or others of the same meaning."""
        text = self.exported.record["instruction"]
        if "instruction" not in self.cfg.perturb:
            return [text] * len(rows)
        for word, other in _SYNONYMS:
            text = re.sub(rf"\b{word}\b", other, text)
        draw = (rows.uniform("perturbed instruction", 1)[:, 0] * len(_FRAMES)).to(torch.int64)
        return [_FRAMES[i].format(text) for i in draw.tolist()]

    def _move(self, rows: Rows, qpos: Tensor) -> Tensor:
        """Return initial positions (n, nq); perturbed, the arm's joints stray and the things move sideways together."""
        if "init" not in self.cfg.perturb:
            return qpos
        moved, shift = qpos.clone(), rows.uniform("perturbed things", 2, low=-_ASIDE, high=_ASIDE)
        moved[:, self._at.columns] += rows.uniform("perturbed arm", ARM, low=-_STRAY, high=_STRAY)
        for column in self._free:
            moved[:, column : column + 2] += shift
        return moved

    def _goal(self, rows: Rows) -> Tensor:
        bodies, sites, turns, joints = (rows.get(name).numpy() for name in ("xpos", "site_xpos", "site_xmat", "qpos"))
        touch = np.zeros((len(rows), 0), np.bool_)
        if self.exported.touch_pairs:
            counts, sensor = rows.get("sensordata").numpy()[:, -len(self.exported.touch_pairs) :], 0
            columns: list[NDArray[np.bool_]] = []
            for one in (goal["touch"] for goal in self.exported.record["goal"] if goal.get("touch")):
                others = sum(map(len, one["except"]))
                columns.append(counts[:, sensor] > counts[:, sensor + 1 : sensor + 1 + others].sum(axis=1))
                sensor += 1 + others
            touch = np.stack(columns, axis=1)
        return torch.from_numpy(
            goal_reached(self.exported.record["goal"], self._ids, (bodies, sites, turns), joints, touch)
        )

    def _look(self, rows: Rows) -> None:
        seen = rows.recall("seen")
        seen[:, :3] = torch.from_numpy(rows.live("site_xpos")[rows.ids.numpy(), self._at.site])
        seen[:, 3:7] = torch.from_numpy(rows.live("xquat")[rows.ids.numpy(), self._at.hand][:, [1, 2, 3, 0]])
        rows.remember("seen", seen)
        rows.remember("shown", torch.from_numpy(rows.live("qpos")[rows.ids.numpy()]))

    def _look_at_fingers(self, rows: Rows) -> None:
        seen = rows.recall("seen")
        seen[:, 7:] = torch.from_numpy(rows.live("qpos")[rows.ids.numpy()][:, self._at.fingers])
        rows.remember("seen", seen)

    def _light(self, rows: Rows) -> None:
        """Put burners where they are seen, or away."""
        if not self._burners or not self.images:
            return
        places, joints = rows.get_model("site_pos"), rows.live("qpos")[rows.ids.numpy()]
        for (site, one), column in zip(self._burners, self._knobs, strict=True):
            lit = joints[:, column] >= one["bound"]
            places[:, site, 2] = torch.from_numpy(self._raw.site_pos[site, 2] - np.where(lit, 0.0, _AWAY))
        rows.set_model("site_pos", places)


def _constants(model: Any, at: PandaLayout, record: Any) -> ArmConstants:
    controller = record["controller"]
    mass0, jac0, pos0, mat0, *_ = reset_arm(model, at, controller["home"])
    mass_at = np.zeros((ARM, ARM), np.int64)
    for i, a in enumerate(at.dofs):
        for j, b in enumerate(at.dofs):
            row, column = max(a, b), min(a, b)
            start, count = int(model.M_rowadr[row]), int(model.M_rownnz[row])
            mass_at[i, j] = start + list(model.M_colind[start : start + count]).index(column)
    low, high = (np.array(limit) for limit in controller["torques"])
    return ArmConstants(
        *(at.joints.astype(np.int64), at.columns, at.dofs, mass_at, at.site, at.motors, at.grippers),
        *(at.grip_center, at.grip_half, np.array(controller["home"]), low, high),
        gains=(controller["kp"], controller["kd"], NULL_KP),
        scale=(controller["output"][0], controller["output"][1]),
        speed=controller["gripper_speed"],
        mass0=np.ascontiguousarray(mass0),
        jac0=np.ascontiguousarray(jac0),
        pos0=pos0,
        mat0=mat0,
    )
