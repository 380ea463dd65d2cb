"""Record robosuite's own OSC_POSE controller on our scene: ``python robosuite_reference.py`` with robosuite 1.4.0."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import robosuite
from robosuite.controllers.osc import OperationalSpaceController
from robosuite.models.grippers import PandaGripper
from robosuite.utils.binding_utils import MjSim
from scene import HOME, initial_states, scene_record, scene_xml

STEPS = 20


def main() -> None:
    """Play 20 random actions and write joints and hand after each."""
    sim = MjSim.from_xml_string(scene_xml())
    model = sim.model._model
    names = [f"robot0_joint{i}" for i in range(1, 8)]
    q_at = [int(model.joint(name).qposadr[0]) for name in names]
    v_at = [int(model.joint(name).dofadr[0]) for name in names]
    limits = scene_record()["controller"]["torques"]
    config = json.loads((Path(robosuite.__file__).parent / "controllers/config/osc_pose.json").read_text())
    indexes = {"joints": names, "qpos": q_at, "qvel": v_at}
    sim.data.qpos[q_at] = HOME
    sim.forward()
    controller = OperationalSpaceController(
        sim=sim, eef_name="gripper0_grip_site", joint_indexes=indexes, actuator_range=np.array(limits),
        policy_freq=20, **{k: v for k, v in config.items() if k not in ("type", "interpolation")},
    )  # fmt: skip
    controller.update_initial_joints(np.array(HOME))
    gripper, nq, state = PandaGripper(), model.nq, initial_states()[0]
    gripper.current_action = np.zeros(2)
    sim.data.qpos[:], sim.data.qvel[:] = state[1 : 1 + nq], state[1 + nq :]
    sim.forward()
    low, high = model.actuator_ctrlrange[7:, 0], model.actuator_ctrlrange[7:, 1]
    rows = []
    for action in np.random.default_rng(7).uniform(-1, 1, (STEPS, 7)):
        for substep in range(25):
            sim.forward()
            if substep == 0:
                controller.set_goal(action[:6])
            torques = np.clip(controller.run_controller(), *np.array(limits))
            move = gripper.format_action(action[6:])
            sim.data.ctrl[7:] = 0.5 * (high + low) + 0.5 * (high - low) * move
            sim.data.ctrl[:7] = torques
            sim.step()
        rows.append([float(x) for x in [*sim.data.qpos[q_at], *sim.data.qpos[7:9]]])
    found = {"robosuite": robosuite.__version__, "joints": rows}
    (Path(__file__).parent / "robosuite_reference.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
