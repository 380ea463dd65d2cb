"""A small scene of our own in the form of an exported task: an arm of seven joints, a cube, a plate, a drawer, a stove.

Made of primitives, so that tests need neither LIBERO nor robosuite. Imported by the script that records robosuite's own
controller on it: no headrace at the top.
"""

from __future__ import annotations

import json

import numpy as np

HOME = [0.0, -0.161037389, 0.0, -2.44459747, 0.0, 2.2267522, 0.7853981633974483]
_ARM = (  # place and orientation of each link, as of a Panda, its mass, and the end of its capsule
    ((0, 0, 0.333), (1, 0, 0, 0), 3.0, (0, 0, -0.15)),
    ((0, 0, 0), (0.70710678, -0.70710678, 0, 0), 3.0, (0, -0.15, 0)),
    ((0, -0.316, 0), (0.70710678, 0.70710678, 0, 0), 2.0, (0.04, 0, -0.05)),
    ((0.0825, 0, 0), (0.70710678, 0.70710678, 0, 0), 2.0, (-0.05, 0.05, 0)),
    ((-0.0825, 0.384, 0), (0.70710678, -0.70710678, 0, 0), 2.0, (0, 0, -0.2)),
    ((0, 0, 0), (0.70710678, 0.70710678, 0, 0), 1.5, (0.05, 0, 0)),
    ((0.088, 0, 0), (0.70710678, 0.70710678, 0, 0), 0.5, (0, 0, 0.08)),
)
_LIMITS = (80, 80, 80, 80, 80, 12, 12)


def scene_xml() -> str:
    """Return the model."""
    opening, closing = "", ""
    for i, (pos, quat, mass, end) in enumerate(_ARM, 1):
        opening += (
            f'<body name="robot0_link{i}" pos="{_text(pos)}" quat="{_text(quat)}">'
            f'<joint name="robot0_joint{i}" axis="0 0 1" damping="0.1" armature="0.01"/>'
            f'<geom type="capsule" size="0.04" fromto="0 0 0 {_text(end)}" mass="{mass}" contype="0" conaffinity="0"/>'
        )
        closing += "</body>"
    hand = """
      <body name="robot0_right_hand" pos="0 0 0.107" quat="0.9238795 0 0 -0.3826834">
        <geom type="box" size="0.03 0.09 0.03" pos="0 0 0.03" mass="0.5" contype="0" conaffinity="0"/>
        <camera name="robot0_eye_in_hand" pos="0.05 0 0" quat="0 0.7071 0.7071 0" fovy="75"/>
        <site name="gripper0_grip_site" pos="0 0 0.097" size="0.005" rgba="1 0 0 0"/>
        <body name="left" pos="0 0 0.06">
          <joint name="gripper0_finger_joint1" type="slide" axis="0 1 0" range="0 0.04" damping="100" armature="1"/>
          <geom type="box" size="0.008 0.005 0.022" pos="0 0.005 0.03" mass="0.1" friction="2 0.05 0.0001"/>
        </body>
        <body name="right" pos="0 0 0.06">
          <joint name="gripper0_finger_joint2" type="slide" axis="0 1 0" range="-0.04 0" damping="100" armature="1"/>
          <geom type="box" size="0.008 0.005 0.022" pos="0 -0.005 0.03" mass="0.1" friction="2 0.05 0.0001"/>
        </body>
      </body>"""
    motors = "".join(
        f'<motor name="robot0_torq_j{i}" joint="robot0_joint{i}" ctrlrange="-{top} {top}"/>'
        for i, top in enumerate(_LIMITS, 1)
    )
    return f"""
<mujoco model="scene">
  <compiler angle="radian"/>
  <option timestep="0.002" impratio="20" cone="elliptic"/>
  <default><geom group="1"/></default>
  <asset><texture name="check" type="2d" builtin="checker" width="8" height="8" rgb1="1 1 1" rgb2="0 0 0"/>
    <material name="check" texture="check"/></asset>
  <worldbody>
    <light pos="0 0 2" dir="0 0 -1"/>
    <camera name="agentview" pos="1.3 0 0.9" xyaxes="0 1 0 -0.5 0 1"/>
    <geom name="floor" type="plane" size="2 2 0.1" material="check"/>
    <body name="robot0_base" pos="-0.5 0 0">{opening}{hand}{closing}</body>
    <body name="cube_main" pos="0.05 0.2 0.03"><freejoint name="cube_joint"/>
      <geom name="cube_g0" type="box" size="0.02 0.02 0.02" mass="0.1" rgba="1 0 0 1"/></body>
    <body name="plate_main" pos="0.1 -0.15 0.01"><freejoint name="plate_joint"/>
      <geom name="plate_g0" type="cylinder" size="0.08 0.01" mass="0.3"/></body>
    <body name="cabinet_main" pos="0.3 0.3 0.1">
      <geom name="cabinet_top" type="box" size="0.1 0.1 0.01" pos="0 0 0.05"/>
      <site name="cabinet_region" type="box" size="0.08 0.08 0.02" rgba="0 1 0 0"/>
      <site name="cabinet_top_region" type="box" size="0.09 0.09 0.01" pos="0 0 0.05" rgba="0 1 0 0"/>
      <body name="drawer"><joint name="drawer_joint" type="slide" axis="1 0 0" range="-0.2 0.01" damping="1"/>
        <geom name="drawer_g0" type="box" size="0.08 0.08 0.005" mass="0.5" pos="0 0 -0.05"/></body>
    </body>
    <body name="stove_main" pos="0.3 -0.3 0.02">
      <geom name="stove_plate" type="box" size="0.1 0.1 0.02"/>
      <geom name="stove_vis" type="box" size="0.02 0.02 0.01" pos="0 0 0.03"/>
      <site name="stove_burner" type="cylinder" size="0.05 0.002" pos="0 0 0.03" rgba="1 0 0 0"/>
      <body name="knob" pos="-0.12 0 0"><joint name="knob_joint" axis="1 0 0" range="0 2" damping="0.1"/>
        <geom name="knob_g0" type="cylinder" size="0.02 0.01" mass="0.05"/></body>
    </body>
  </worldbody>
  <actuator>{motors}
    <position name="gripper0_gripper_finger_joint1" joint="gripper0_finger_joint1" kp="1000" ctrlrange="0 0.04"/>
    <position name="gripper0_gripper_finger_joint2" joint="gripper0_finger_joint2" kp="1000" ctrlrange="-0.04 0"/>
  </actuator>
</mujoco>"""


def _joint(kind: str, joint: str, sign: str, bound: float) -> dict[str, object]:
    above, inclusive = sign[0] == ">", sign.endswith("=")
    every = kind in ("close", "turnoff")
    return {"kind": kind, "joints": [joint], "all": every, "above": above, "bound": bound, "inclusive": inclusive}


def _touch(other: str, *left_out: str) -> dict[str, object]:
    return {"bodies": ["cube_main", other], "except": [[], list(left_out)]}


_INSIDE = {"site": "cabinet_region", "size": [0.08, 0.08, 0.02], "touch": None}
_ABOVE = {"site": "cabinet_top_region", "size": [0.09, 0.09, 0.01], "touch": _touch("cabinet_main")}
GOALS = {
    "in-site": {"kind": "in-site", "body": "cube_main", **_INSIDE},
    "on-site": {"kind": "on-site", "body": "cube_main", **_ABOVE},
    "on-object": {"kind": "on-object", "body": "cube_main", "other": "plate_main", "touch": _touch("plate_main")},
    "on-except": {
        "kind": "on-object",
        "body": "cube_main",
        "other": "stove_main",
        "touch": _touch("stove_main", "stove_vis"),
    },
    "open": _joint("open", "drawer_joint", "<", -0.14),
    "close": _joint("close", "drawer_joint", ">", 0.0),
    "turnon": _joint("turnon", "knob_joint", ">=", 0.5),
    "turnoff": _joint("turnoff", "knob_joint", "<", 0.0),
}
"""Every kind of predicate, as ``export.py`` writes them."""


def scene_record(*goals: str) -> dict[str, object]:
    """Return the record of an exported task with some of ``GOALS``."""
    limits = [float(top) for top in _LIMITS]
    return {
        "digest": "scene",
        "instruction": "put the cube on the plate",
        "goal": [GOALS[name] for name in goals or ("on-object",)],
        "fixtures": ["cabinet_main"],
        "burners": [
            {"site": "stove_burner", "joint": "knob_joint", "above": True, "bound": 0.5, "inclusive": True},
        ],
        "objects": {"cube": "cube_main", "plate": "plate_main"},
        "interest": ["cube", "plate"],
        "controller": {
            "home": HOME,
            "kp": 150.0,
            "kd": 2 * np.sqrt(150.0),
            "output": [0.05, 0.5],
            "torques": [[-top for top in limits], limits],
            "gripper_speed": 0.01,
        },
    }


def initial_states(count: int = 5) -> np.ndarray:
    """Return (count, 1 + nq + nv): the arm near home, the cube at several places."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        arm = np.array(HOME) + rng.uniform(-0.05, 0.05, 7)
        cube = [0.05 + rng.uniform(-0.05, 0.05), 0.2, 0.02, 1, 0, 0, 0]
        plate = [0.1, -0.15, 0.01, 1, 0, 0, 0]
        qpos = [*arm, 0.02, -0.02, *cube, *plate, 0.0, 0.0]
        rows.append([0.0, *qpos, *np.zeros(len(qpos) - 2)])
    return np.array(rows)


def fixture_draws() -> np.ndarray:
    """Return (1, 8, 7): poses of the cabinet."""
    shift = np.linspace(-0.02, 0.02, 8)
    return np.array([[[0.3 + s, 0.3, 0.1, 1, 0, 0, 0] for s in shift]])


def write_scene(path, *goals: str) -> None:
    """Write the scene as the file of an exported task."""
    from headrace.sim.mujoco_api import load_model

    model = load_model(scene_xml())
    record = np.array(json.dumps(scene_record(*goals)))
    rgba = {"site_rgba": model.site_rgba, "geom_rgba": model.geom_rgba}
    np.savez(path, xml=np.array(scene_xml()), record=record, states=initial_states(), fixtures=fixture_draws(), **rgba)


def _text(numbers) -> str:
    return " ".join(map(str, numbers))
