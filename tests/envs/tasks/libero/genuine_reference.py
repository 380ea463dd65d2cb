"""Play genuine LIBERO and write what it did. Run by ``make test-libero`` in the environment that has it.

``python genuine_reference.py OUT.npz ASSETS EXPORT_DIRECTORY``. Beside each genuine episode the plain reference of
headrace plays the same actions in the same MuJoCo, and its largest differences are written.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

LIBERO = Path(__file__).parents[4] / "src" / "headrace" / "envs" / "tasks" / "libero"
sys.path.insert(0, str(LIBERO))
import export  # noqa: E402
import genuine  # noqa: E402
import plain  # noqa: E402

PLAYED = [
    *("libero_spatial/0", "libero_spatial/7", "libero_object/0", "libero_object/6", "libero_goal/0", "libero_goal/7"),
    *("libero_10/2", "libero_10/4", "libero_10/9", "libero_90/0", "libero_90/60"),
]
"""Random actions from an initial state, waits first."""
JUDGED = {
    "in": ["libero_object/0", "libero_10/3", "libero_10/9"],
    "on": ["libero_spatial/0", "libero_goal/1", "libero_goal/2", "libero_goal/5"],
    "joints": ["libero_goal/0", "libero_goal/7", "libero_10/3", "libero_10/9", "libero_90/0", "libero_90/39"],
}
"""Random states, each predicate of the goal alone."""
STEPS, STATES = 60, 200


def play(env, arrays, own, seed):
    """Wait 10 steps and play random ones; returns what both did."""
    np.random.seed(seed)
    env.reset()
    record = own.record
    model = env.sim.model._model
    poses = {name: np.concatenate([model.body(name).pos, model.body(name).quat]) for name in record["fixtures"]}
    state = arrays["states"][seed % len(arrays["states"])]
    obs = env.set_init_state(state)
    own.reset(state, poses)
    first = np.concatenate([obs["robot0_eef_pos"], obs["robot0_eef_quat"], obs["robot0_gripper_qpos"]])
    moves = np.random.default_rng(seed).uniform(-1, 1, (STEPS - 10, 7))
    actions = np.concatenate([np.tile(plain.WAIT, (10, 1)), moves])
    rows, seen, done, apart, blind = [], [], [], [], []
    for action in actions:
        obs, _, success, _ = env.step(action)
        reached = own.step(action)
        rows.append(env.get_sim_state()[1:])
        seen.append(np.concatenate([obs["robot0_eef_pos"], obs["robot0_eef_quat"], obs["robot0_gripper_qpos"]]))
        done.append(bool(success))
        apart.append(np.abs(own.data.qpos - env.sim.data.qpos))
        mine = np.concatenate([own.seen["eef_pos"], own.seen["eef_quat"], own.seen["gripper_qpos"]])
        blind.append(np.abs(mine - seen[-1]).max())
        assert reached == bool(success), "success"
    return {
        "seed": np.array(seed), "poses": np.array(list(poses.values())).reshape(-1, 7), "actions": actions,
        "rows": np.array(rows), "seen": np.array(seen), "first": first, "success": np.array(done),
        "apart": np.array(apart), "observed_apart": np.array(blind),
    }  # fmt: skip


def judge(env, arrays, own, kind, seed):
    """Evaluate each predicate of the goal in random states; returns states, verdicts and how often both agree."""
    rng = np.random.default_rng(seed)
    np.random.seed(seed)
    env.reset()
    inner, sim, model = env.env, env.sim, own.model
    for name in own.record["fixtures"]:
        body = model.body(name).id
        model.body_pos[body], model.body_quat[body] = sim.model._model.body_pos[body], sim.model._model.body_quat[body]
    states, verdicts, mine = [], [], []
    goals = list(zip(inner.parsed_problem["goal_state"], own.record["goal"], strict=True))
    chosen = [g for g in goals if (g[1]["kind"].partition("-")[0] if "-" in g[1]["kind"] else "joints") == kind]
    base = arrays["states"][0]
    for k in range(STATES):
        state = base.copy()
        qpos = state[1 : 1 + model.nq]
        env.set_state(state)
        sim.forward()
        for _, one in chosen:
            if kind == "joints":
                for joint in one["joints"]:
                    low, high = model.joint(joint).range
                    at = model.jnt_qposadr[model.joint(joint).id]
                    near = one["bound"] + rng.uniform(-0.01, 0.01)
                    qpos[at] = near if k % 2 else rng.uniform(low, high)
                continue
            body = model.body(one["body"]).id
            at = model.jnt_qposadr[model.body_jntadr[body]]
            if "site" in one:
                site = model.site(one["site"]).id
                center, turn = np.array(sim.data.site_xpos[site]), np.array(sim.data.site_xmat[site]).reshape(3, 3)
                size = np.abs(turn @ np.array(one["size"]))
                low = -1.3 * size if kind == "in" else np.array([-1.3 * size[0], -1.3 * size[1], size[2] - 0.02])
                high = 1.3 * size if kind == "in" else np.array([1.3 * size[0], 1.3 * size[1], size[2] + 0.12])
            else:
                center = np.array(sim.data.body_xpos[model.body(one["other"]).id])
                low, high = np.array([-0.04, -0.04, -0.01]), np.array([0.04, 0.04, 0.05])
            qpos[at : at + 3] = center + rng.uniform(low, high)
        env.set_state(state)
        sim.forward()
        own.data.qpos[:], own.data.qvel[:] = qpos, state[1 + model.nq :]
        plain._mujoco().mj_forward(model, own.data)
        places = tuple(np.array(part)[None] for part in (own.data.xpos, own.data.site_xpos, own.data.site_xmat))
        row, own_row = [], []
        for predicate, one in chosen:
            row.append(bool(inner._eval_predicate(predicate)))
            touch = [[own._touches(*own._touching(one["touch"]))]] if one.get("touch") else [[]]
            verdict = plain.goal_reached([one], own._ids, places, np.array(own.data.qpos)[None], np.array(touch, bool))
            own_row.append(bool(verdict[0]))
        states.append(qpos.copy())
        verdicts.append(row)
        mine.append(own_row)
    poses = np.array([np.concatenate([model.body(n).pos, model.body(n).quat]) for n in own.record["fixtures"]])
    kinds = np.array([own.record["goal"].index(one) for _, one in chosen])
    return {
        "qpos": np.array(states), "verdicts": np.array(verdicts), "mine": np.array(mine), "which": kinds,
        "poses": poses.reshape(-1, 7),
    }  # fmt: skip


def look(suites, assets, exported, name="libero_goal/7", pixels=64):
    """Compare pictures drawn on demand, every other step, with those that LIBERO draws in every step."""
    cameras = ["agentview", "robot0_eye_in_hand"]
    settings = {"waits": 2, "horizon": 99, "gripper": "signed", "pixels": pixels, "cameras": cameras}
    file = str(exported / f"{name.replace('/', '-')}.npz")
    one = genuine.make(name, file, str(assets), "robosuite", settings)
    one.reset(seed=0)
    suite, _, index = name.partition("/")
    bddl = export.task_files(suites[suite].get_task(int(index)))[0]
    drawn = {"use_camera_obs": True, "has_offscreen_renderer": True, "camera_names": cameras}
    env = export.make_env(bddl, hard_reset=False, camera_heights=pixels, camera_widths=pixels, **drawn)
    env.reset()
    gripper, model = env.robots[0].gripper, env.sim.model._model
    gripper.current_action = np.zeros(gripper.dof)
    for fixture, pose in zip(one._own.record["fixtures"], one._arrays["fixtures"][:, 0], strict=True):
        model.body(fixture).pos[:], model.body(fixture).quat[:] = pose[:3], pose[3:]
    obs = env.set_init_state(one._arrays["states"][0])
    for _ in range(settings["waits"]):
        obs, *_ = env.step(np.array(plain.WAIT))
    apart = []
    for step, action in enumerate(np.random.default_rng(0).uniform(-1, 1, (6, 7))):
        if step % 2 == 0:
            mine = one.draw()
            apart += [np.abs(mine[c].astype(int) - obs[f"{c}_image"][::-1]).max() for c in cameras]
        one.step(action)
        obs, *_ = env.step(action)
    return np.array(apart)


def main() -> None:
    """Play and judge everything."""
    out, assets, exported = Path(sys.argv[1]), Path(sys.argv[2]).resolve(), Path(sys.argv[3])
    suites, found = export.load_benchmark(assets), {}

    def opened(name):
        suite, _, index = name.partition("/")
        task = suites[suite].get_task(int(index))
        own, arrays = plain.load_plain(str(exported / f"{suite}-{index}.npz"), plain.FORWARDS)
        return export.make_env(export.task_files(task)[0]), own, arrays

    names = sys.argv[4:] or sorted({*PLAYED, *(name for tasks in JUDGED.values() for name in tasks)})
    for name in names:
        begun = time.monotonic()
        env, own, arrays = opened(name)
        said = [name]
        if name in PLAYED:
            got = play(env, arrays, own, PLAYED.index(name))
            found |= {f"play:{name}:{key}": value for key, value in got.items()}
            largest = got["apart"][:, own.at.columns].max(), got["apart"].max(), got["observed_apart"].max()
            said.append("joints {:.1e}, all {:.1e}, observed {:.1e}".format(*largest))
        for kind, tasks in JUDGED.items():
            if name in tasks:
                got = judge(env, arrays, own, kind, 0)
                found |= {f"judge:{name}:{kind}:{key}": value for key, value in got.items()}
                said.append(f"{kind}: {got['verdicts'].mean(0)} true, {(got['verdicts'] != got['mine']).sum()} differ")
        env.close()
        print(*said, f"{time.monotonic() - begun:.0f} s", sep="; ", flush=True)
    if not sys.argv[4:]:
        found["pictures_apart"] = look(suites, assets, exported)
        print("pictures on demand differ by", found["pictures_apart"].max(), flush=True)
    found["versions"] = np.array(json.dumps({"mujoco": plain._mujoco().__version__}))
    np.savez_compressed(out, **found)


if __name__ == "__main__":
    main()
