"""Write LIBERO's tasks as files that need neither LIBERO nor robosuite. Runs alone in an interpreter that has both.

``python export.py --out DIRECTORY --assets DIRECTORY NAME…`` writes one ``.npz`` per task: the MJCF as robosuite
compiles it, the goal as numbers, the benchmark's initial states, poses of fixtures drawn by LIBERO's own samplers, the
constants of the controller. A line of JSON per task goes to standard output. headrace is not imported.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FORMAT = 1
"""Of the files; part of their hash."""
DRAWS = 256
"""Poses of fixtures per task."""
_WRITTEN = {"site_rgba", "geom_rgba", "body_pos", "body_quat"}
"""Model fields that LIBERO writes after compiling."""


def _load(module: str) -> Any:
    """Import a package of this interpreter, which headrace's own does not have."""
    return importlib.import_module(module)


def config_directory(assets: Path) -> str:
    """Make the configuration without which LIBERO's import reads from standard input."""
    spec = importlib.util.find_spec("libero")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    if not roots:
        raise SystemExit(
            f"{sys.executable} has no LIBERO; run: pip install --no-deps hf-libero==0.1.4 (and robosuite==1.4.0)"
        )
    root = Path(roots[0]) / "libero"
    directory = tempfile.mkdtemp(prefix="headrace-libero-")
    paths = {"benchmark_root": root, "bddl_files": root / "bddl_files", "init_states": root / "init_files"}
    paths |= {"datasets": root.parent / "datasets", "assets": assets}
    Path(directory, "config.yaml").write_text("".join(f"{name}: {json.dumps(str(p))}\n" for name, p in paths.items()))
    return directory


def load_benchmark(assets: Path) -> dict[str, Any]:
    """Import LIBERO with its assets in ``assets``; returns its suites by name."""
    os.environ["LIBERO_CONFIG_PATH"] = config_directory(assets)
    with contextlib.redirect_stdout(sys.stderr):
        _load("libero.libero")._assets_path_cache = str(assets)
        benchmark = _load("libero.libero.benchmark")
        return {name: suite() for name, suite in benchmark.get_benchmark_dict().items() if name != "libero_100"}


def task_files(task: Any) -> tuple[Path, Path]:
    """Return the BDDL file and the initial states of a task of the benchmark."""
    where = _load("libero.libero").get_libero_path
    bddl = Path(where("bddl_files"), task.problem_folder, task.bddl_file)
    return bddl, Path(where("init_states"), task.problem_folder, task.init_states_file)


def source_hash(bddl: Path, states: Path, assets: Path) -> str:
    """Return what an exported file depends on, as a hash."""
    versions = [importlib.metadata.version(name) for name in ("hf-libero", "robosuite", "mujoco")]
    parts = [str(FORMAT), *versions, str(assets), bddl.read_text()]
    return hashlib.sha256("\n".join(parts).encode() + states.read_bytes()).hexdigest()[:16]


def make_env(bddl: Path, **changes: Any) -> Any:
    """Make the genuine environment of a BDDL file; without cameras unless ``changes`` name some."""
    plain = {"use_camera_obs": False, "has_offscreen_renderer": False}  # so that no GL is needed
    with contextlib.redirect_stdout(sys.stderr):
        return _load("libero.libero.envs.env_wrapper").ControlEnv(bddl_file_name=str(bddl), **{**plain, **changes})


def export_task(bddl: Path, states: Path, language: str, digest: str) -> dict[str, Any]:
    """Return the arrays of a task's file."""
    import numpy as np
    import torch

    env = make_env(bddl, hard_reset=False)  # the reset need not compile the model again
    np.random.seed(0)
    env.reset()
    inner, sim = env.env, env.sim
    # not sim.model.get_xml(): MuJoCo writes that without inertiagrouprange, and visual meshes would get mass
    xml = inner.model.get_xml()
    fresh, used = _load("mujoco").MjModel.from_xml_string(xml), sim.model._model
    names = [n for n in dir(fresh) if not n.startswith("_") and isinstance(getattr(fresh, n), np.ndarray)]
    pairs = {name: (getattr(fresh, name), getattr(used, name)) for name in names}
    # normals of degenerate faces are NaN
    changed = {n for n, (a, b) in pairs.items() if not np.array_equal(a, b, equal_nan=a.dtype.kind == "f")}
    if changed - _WRITTEN:
        raise RuntimeError(f"LIBERO wrote {sorted(changed - _WRITTEN)} into the compiled model, which is not exported")
    controller, robot = inner.robots[0].controller, inner.robots[0]
    fixtures = [f for f in inner.fixtures_dict.values() if f.root_body in sim.model.body_names]
    placed = _fixture_draws(inner, fixtures)
    initial = np.asarray(torch.load(states, weights_only=False), np.float64)
    if initial.shape[1] != 1 + fresh.nq + fresh.nv:
        raise RuntimeError(f"initial states: expected {1 + fresh.nq + fresh.nv} numbers, got {initial.shape[1]}")
    goal = [_predicate(inner, sim, state) for state in inner.parsed_problem["goal_state"]]
    low, high = robot.torque_limits
    record = {
        "digest": digest,
        "instruction": language,
        "versions": {name: importlib.metadata.version(name) for name in ("hf-libero", "robosuite", "mujoco")},
        "goal": goal,
        "fixtures": [body for body, _ in placed],
        "burners": _burners(inner),
        "objects": {name: o.root_body for name, o in inner.objects_dict.items()},
        "interest": list(inner.obj_of_interest),
        "controller": {
            "home": list(map(float, controller.initial_joint)),
            "kp": float(controller.kp[0]),
            "kd": float(controller.kd[0]),
            "output": [float(controller.output_max[0]), float(controller.output_max[3])],
            "torques": [list(map(float, low)), list(map(float, high))],
            "gripper_speed": float(robot.gripper.speed),
        },
    }
    env.close()
    return {
        "xml": np.array(xml),
        "record": np.array(json.dumps(record)),
        "states": initial,
        "fixtures": np.array([poses for _, poses in placed]).reshape(len(placed), DRAWS, 7),
        "site_rgba": np.array(used.site_rgba),
        "geom_rgba": np.array(used.geom_rgba),
    }


def _fixture_draws(inner: Any, fixtures: list[Any]) -> list[tuple[str, Any]]:
    """Draw the poses of fixtures as LIBERO's reset does, from its own samplers: root body, (DRAWS, 7)."""
    import numpy as np

    found: list[tuple[str, Any]] = []
    for fixture in fixtures:
        sampler = inner.placement_initializer.samplers.get(f"{fixture.name}_sampler")
        if sampler is None:  # stands where the model has it
            continue
        poses: list[Any] = []
        for _ in range(DRAWS):
            ((place, turn, _),) = sampler.sample().values()
            poses.append(np.concatenate([place, turn]))
        found.append((fixture.root_body, np.array(poses)))
    return found


def _burners(inner: Any) -> list[dict[str, Any]]:
    """Return the sites that are seen while a joint is turned on."""
    found: list[dict[str, Any]] = []
    for state in inner.tracking_object_states_change:
        thing = inner.get_object(state.object_name)
        for site, _ in thing.object_properties["vis_site_names"].values():
            found.append({"site": site, "joint": thing.joints[0], **_threshold(thing, "turn_on")})
    return found


def _threshold(thing: Any, method: str) -> dict[str, Any]:
    """Find the comparison that ``thing.is_open(q)`` is, or its like: above or below a number, with or without it."""
    holds = getattr(thing, method)
    above = bool(holds(1e9))
    if above == bool(holds(-1e9)):
        raise RuntimeError(f"{thing.name}.{method}: expected a comparison with one number")
    ranges = [float(x) for values in thing.object_properties["articulation"].values() for x in values]
    for bound in ranges:
        if bool(holds(bound + 1e-9)) == above and bool(holds(bound - 1e-9)) != above:
            return {"above": above, "bound": bound, "inclusive": bool(holds(bound))}
    raise RuntimeError(f"{thing.name}.{method}: none of {ranges} is where it changes")


def _predicate(inner: Any, sim: Any, state: list[str]) -> dict[str, Any]:
    """Return one predicate of a goal in terms of bodies, sites and joints of the model."""
    kind, first = state[0].lower(), inner.object_states_dict[state[1]]
    if kind in ("in", "on"):
        second, body = inner.object_states_dict[state[2]], inner.get_object(state[1]).root_body
        if second.object_state_type == "site":
            site = inner.object_sites_dict[state[2]]
            parent = inner.get_object(second.parent_name) if kind == "on" else None
            if kind == "on" and not hasattr(site, "under"):
                raise RuntimeError(f"{state}: a site without under()")
            touch = None if parent is None else _touching(sim, inner.get_object(state[1]), parent)
            size = [float(x) for x in site.size]
            return {"kind": f"{kind}-site", "body": body, "site": state[2], "size": size, "touch": touch}
        if kind == "in":
            raise RuntimeError(f"{state}: In an object that is no site")
        other = inner.get_object(state[2])
        touch = _touching(sim, inner.get_object(state[1]), other)
        return {"kind": "on-object", "body": body, "other": other.root_body, "touch": touch}
    methods = {"open": "is_open", "close": "is_close", "turnon": "turn_on", "turnoff": "turn_off"}
    if kind not in methods:
        raise RuntimeError(f"{state}: expected one of in, on, {', '.join(methods)}")
    site = first.object_state_type == "site"
    owner = inner.get_object(first.parent_name) if site else inner.get_object(state[1])
    joints = list(inner.object_sites_dict[state[1]].joints if site else owner.joints)
    return {"kind": kind, "joints": joints, "all": kind in ("close", "turnoff"), **_threshold(owner, methods[kind])}


def _touching(sim: Any, first: Any, second: Any) -> dict[str, Any]:
    """Return the root bodies of two things, and geoms below them that can touch and are no ``contact_geoms``."""
    model, others = sim.model._model, list[list[str]]()
    for thing in (first, second):
        root, below = model.body(thing.root_body).id, set[int]()
        for body in range(model.nbody):
            if body == root or model.body_parentid[body] in below:
                below.add(body)
        own = [g for g in range(model.ngeom) if model.geom_bodyid[g] in below]
        names = {model.geom(g).name for g in own if model.geom_contype[g] or model.geom_conaffinity[g]}
        others.append(sorted(names - set(thing.contact_geoms)))
    if all(others):
        raise RuntimeError(f"{first.name}, {second.name}: both have geoms that are not LIBERO's own: {others}")
    return {"bodies": [first.root_body, second.root_body], "except": others}


def main() -> None:
    """Export the named tasks, those whose file is up to date excepted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("names", nargs="+", help="libero_spatial/0 …")
    options = parser.parse_args()
    say, sys.stdout = sys.stdout, sys.stderr  # LIBERO prints
    import numpy as np

    suites = load_benchmark(options.assets)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        begun = time.monotonic()
        suite, _, index = name.partition("/")
        task = suites[suite].get_task(int(index))
        bddl, states = task_files(task)
        digest, target = source_hash(bddl, states, options.assets), options.out / f"{suite}-{index}.npz"
        line: dict[str, Any] = {"name": name, "cached": False, "error": None}
        try:
            if target.is_file():
                with np.load(target) as old:
                    line["cached"] = json.loads(str(old["record"]))["digest"] == digest
            if not line["cached"]:
                arrays, part = export_task(bddl, states, task.language, digest), target.with_suffix(".part")
                with part.open("wb") as file:
                    np.savez_compressed(file, **arrays)
                part.replace(target)
        except Exception as error:  # noqa: BLE001  # whatever LIBERO raises for one task; the others are exported all the same
            line["error"] = f"{type(error).__name__}: {error}"
        line["seconds"] = round(time.monotonic() - begun, 1)
        print(json.dumps(line), file=say, flush=True)


if __name__ == "__main__":
    main()
