"""Part (e) of the vision benchmark: cameras on robots made of meshes, against MuJoCo's renderers and ray casters.

  headrace      NativeCamera, poses included, two threads; "moving" draws without static layers, as a camera that moves
  egl fair      mujoco.Renderer in two processes, without shadows, reflections and antialiasing, which NativeCamera
                leaves out by default: what the bars are about
  egl, osmesa   the same as a user gets it (with shadows, reflections, four samples per pixel); OSMesa as the fair EGL
  mujoco-warp   create_render_context and render
  newton        SensorCamera without shadows and textures

16 environments around the pose in which the task begins; frames per second, medians of rounds in turn.

Part (f) has the scene "table", textures and things of LIBERO's assets ($HEADRACE_LIBERO_ASSETS), else of robosuite's:
two cameras, with highlights.

  python benchmarks/vision_robots.py            the whole table (gym-aloha and metaworld: make bench-setup)
  python benchmarks/vision_robots.py --quick    ALOHA at 84 x 84, headrace and the fair EGL, under a minute
  python benchmarks/vision_robots.py --check    exit 1 and name each bar that falls short and each absent peer
  python benchmarks/vision_robots.py --scene sawyer --size 224x224 --peer "egl fair"    a part of it, about a minute
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from interleaved import PeerMissingError, Worker, python_of, serve

SCENES = {
    "aloha": ("gym_aloha", "assets/bimanual_viperx_transfer_cube.xml", "top"),
    "sawyer": ("metaworld", "assets/sawyer_xyz/sawyer_pick_place_v3.xml", "corner"),
}
SIZES = ((84, 84), (224, 224), (480, 640))
TABLE_BARS = {"128x128": 20.0, "256x256": 10.0}
"""Of the scene "table", by size: at least so many times the fair EGL."""
TABLE_SOURCES = {
    "LIBERO": (
        "scenes/libero_tabletop_base_style.xml",
        "stable_hope_objects/{0}/{0}.xml",
        ("ketchup", "milk", "butter"),
    ),
    "robosuite": ("arenas/table_arena.xml", "objects/{0}.xml", ("can", "milk", "cereal")),
}
"""Scene, things that lie on its table, and their names, below a directory of assets."""
KINDS = {"rgb": ("rgb",), "rgb+depth+seg": ("rgb", "depth", "segmentation")}
BARS = {
    ("rgb", "fixed"): (10.0, 7.0, 3.5),
    ("rgb+depth+seg", "fixed"): (20.0, 15.0, 10.0),
    ("rgb", "moving"): (7.0, 4.0, 1.5),
}
"""At least so many times the fair EGL, by size."""
PEERS = ("egl fair", "egl", "osmesa fair", "mujoco-warp", "newton")
ENVS = 16
ALOHA_ARM = (0, -0.96, 1.16, 0, -0.3, 0, 0.02239, -0.02239)
"""Where gym-aloha puts both arms at the start."""


def _load_table() -> tuple[Any, list[str], np.ndarray]:
    """Return what :func:`load` does, of a textured table with things on it."""
    import mujoco

    given, found = os.environ.get("HEADRACE_LIBERO_ASSETS"), importlib.util.find_spec("robosuite")
    if given is None and (found is None or not found.submodule_search_locations):
        raise SystemExit(
            "neither HEADRACE_LIBERO_ASSETS nor robosuite is there; set it to LIBERO's libero/libero/assets"
        )
    home = Path(given) if given else Path(found.submodule_search_locations[0]) / "models" / "assets"
    scene, thing, names = TABLE_SOURCES["LIBERO" if given else "robosuite"]
    spec = mujoco.MjSpec.from_file(str(home / scene))
    for k, name in enumerate(names):
        part = mujoco.MjSpec.from_file(str(home / thing.format(name)))
        part.worldbody.bodies[0].add_freejoint()
        spec.attach(part, prefix=f"{name}_", frame=spec.worldbody.add_frame(pos=[0.15 * (k - 1), 0.1 * k, 0.95]))
    model = spec.compile()
    qpos = np.tile(model.qpos0, (ENVS, 1))
    for joint in range(model.njnt):
        at = model.jnt_qposadr[joint]
        qpos[:, at : at + 2] += np.random.default_rng(joint).normal(size=(ENVS, 2)) * 0.03
    return model, ["agentview", "frontview"], qpos


def load(scene: str) -> tuple[Any, list[str], np.ndarray]:
    """Model, cameras and float64 (ENVS, nq) positions around the pose in which the task begins."""
    import mujoco

    if scene == "table":
        return _load_table()
    package, path, camera = SCENES[scene]
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{package} is not installed; run: make bench-setup")
    model = mujoco.MjModel.from_xml_path(str(Path(found.submodule_search_locations[0]) / path))
    rng, start = np.random.default_rng(0), model.qpos0.copy()
    if scene == "aloha":
        start[:16] = ALOHA_ARM * 2
    else:
        # the hand is pulled to its place by a mocap body, as metaworld does at reset
        data = mujoco.MjData(model)
        for _ in range(400):
            data.mocap_pos[0], data.mocap_quat[0] = (0, 0.6, 0.2), (1, 0, 1, 0)
            data.ctrl[:] = -1, 1
            mujoco.mj_step(model, data)
        start = data.qpos.copy()
    qpos = np.tile(start, (ENVS, 1))
    for joint in range(model.njnt):
        at, hinge = model.jnt_qposadr[joint], model.jnt_type[joint] == int(mujoco.mjtJoint.mjJNT_HINGE)
        if model.jnt_type[joint] >= int(mujoco.mjtJoint.mjJNT_SLIDE):
            qpos[:, at] += rng.normal(size=ENVS) * (0.08 if hinge else 0.01)
    return model, [camera], qpos


# The workers' side: a function per contestant that returns "draw these environments once".


def _headrace(scene: str, height: int, width: int, kinds: tuple[Any, ...], motion: str) -> Callable[[], object]:
    from headrace.sim import CameraSpec, NativeCamera
    from headrace.sim.camera.camera import CameraFrames, PoseReader

    model, names, qpos = load(scene)
    size = {"width": width, "height": height, "data_types": kinds, "specular": scene == "table"}
    size |= {"groups": (1,)} if scene == "table" else {}  # robosuite keeps shapes that only collide in group 0
    specs = [CameraSpec(name=name, **size) for name in names]
    cameras = [NativeCamera(model, spec, threads=2, layers=motion == "fixed") for spec in specs]
    reader, outs = PoseReader(model, threads=2), [CameraFrames.empty(spec, ENVS) for spec in specs]

    def draw() -> None:
        poses = reader.read(qpos)
        for camera, out in zip(cameras, outs, strict=True):
            camera.render(poses, out)

    return draw


def _opengl(scene: str, height: int, width: int, kinds: tuple[Any, ...], fair: bool) -> Callable[[], object]:
    import mujoco

    model, names, qpos = load(scene)
    model.vis.global_.offwidth, model.vis.global_.offheight = max(640, width), max(480, height)
    if fair:
        model.vis.quality.offsamples = 0
    data, renderer = mujoco.MjData(model), mujoco.Renderer(model, height, width)
    flags, option = renderer.scene.flags, mujoco.MjvOption()
    option.geomgroup[0] = option.sitegroup[0] = scene != "table"
    if fair:
        flags[mujoco.mjtRndFlag.mjRND_SHADOW] = flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0

    def draw() -> None:
        for row in qpos[: ENVS // 2]:
            data.qpos[:] = row
            mujoco.mj_fwdPosition(model, data)
            for name in names:
                renderer.update_scene(data, name, scene_option=option)
                assert renderer.render().any(), "a blank picture"
                if "depth" in kinds:
                    renderer.enable_depth_rendering()
                    renderer.render()
                    renderer.disable_depth_rendering()
                    renderer.enable_segmentation_rendering()
                    renderer.render()
                    renderer.disable_segmentation_rendering()

    return draw


def _mujoco_warp(scene: str, height: int, width: int, kinds: tuple[Any, ...]) -> Callable[[], object]:
    import mujoco
    import mujoco_warp as mjw
    import warp as wp

    wp.config.quiet = True
    model, (name, *_), qpos = load(scene)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    m, d = mjw.put_model(model), mjw.put_data(model, data, nworld=ENVS)
    more = "depth" in kinds
    context = mjw.create_render_context(
        model, nworld=ENVS, cam_res=(width, height), render_rgb=True, render_depth=more, render_seg=more,
        cam_active=[name],
    )  # fmt: skip
    positions = qpos.astype(np.float32)

    def draw() -> object:
        d.qpos.assign(positions)
        mjw.kinematics(m, d)
        mjw.com_pos(m, d)
        mjw.camlight(m, d)
        mjw.refit_bvh(m, d, context)
        mjw.render(m, d, context)
        return context.rgb_data.numpy()

    return draw


def _newton(scene: str, height: int, width: int) -> Callable[[], object]:
    import math

    import mujoco
    import newton
    import warp as wp
    from newton.sensors import SensorCamera

    wp.config.quiet = True
    reference, (name, *_), _ = load(scene)
    package, path, _ = SCENES[scene]
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations
    file = Path(found.submodule_search_locations[0]) / path

    def resolve(folder: str | None, name: str) -> str:
        """Files named in an included file are relative to it, or, as MuJoCo has it, to the model's own file."""
        near = Path(folder or file.parent, name)
        return str((near if near.exists() else file.parent / name).resolve())

    one = newton.ModelBuilder()
    one.add_mjcf(str(file), path_resolver=resolve)
    builder = newton.ModelBuilder()
    builder.replicate(one, ENVS)
    model = builder.finalize(device="cpu")
    state = model.state()
    config = SensorCamera.RenderConfig(enable_shadows=False, enable_textures=False)
    camera = SensorCamera(model, default_render_config=config)
    camera.create_default_light(enable_shadows=False)
    data = mujoco.MjData(reference)
    mujoco.mj_forward(reference, data)
    number, quat = reference.camera(name).id, np.empty(4)
    mujoco.mju_mat2Quat(quat, data.cam_xmat[number])
    pose = np.array([*data.cam_xpos[number], *quat[1:], quat[0]], np.float32)
    transforms = wp.array(np.tile(pose, (ENVS, 1)), dtype=wp.transformf, device="cpu")
    fov = math.radians(reference.cam_fovy[number])
    rays = SensorCamera.compute_camera_rays_pinhole(width, height, camera_fov=fov, device="cpu")
    color = camera.allocate_image_color(ENVS, width, height)

    def draw() -> object:
        newton.eval_fk(model, model.joint_q, model.joint_qd, state)
        model.bvh_refit_shapes(state)
        camera.update(state, transforms, rays, color_image=color)
        return color.numpy()

    return draw


def _work(name: str, scene: str, size: str, kinds: str, seconds: float) -> None:
    height, width = (int(side) for side in size.split("x"))
    wanted = KINDS[kinds]
    count = ENVS
    if name.startswith("headrace"):
        draw = _headrace(scene, height, width, wanted, name.split()[1])
    elif name == "mujoco-warp":
        draw = _mujoco_warp(scene, height, width, wanted)
    elif name == "newton":
        draw = _newton(scene, height, width)
    else:
        draw, count = _opengl(scene, height, width, wanted, name.endswith("fair")), ENVS // 2
    draw()
    draw()

    def measure() -> float:
        frames, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds:
            draw()
            frames += count
        return frames / spent

    serve({}, measure)


class _Team:
    """A contestant: MuJoCo's renderers as two processes whose speeds add up, the others as one with two threads."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        python = ".venv-bench" if name.startswith("headrace") else ".venv-bench-sim"
        command = [str(python_of(python)), os.path.abspath(__file__), "--worker", name, *arguments]
        environment = {"OMP_NUM_THREADS": "2", "HEADRACE_NUM_THREADS": "2"}
        opengl = name.startswith(("egl", "osmesa"))
        if opengl:
            environment = {"MUJOCO_GL": name.split()[0], "PYOPENGL_PLATFORM": name.split()[0]}
        self.workers = [Worker(name, command, environment) for _ in range(2 if opengl else 1)]

    def measure(self) -> float:
        values: list[float] = []
        threads = [threading.Thread(target=lambda w=w: values.append(w.measure())) for w in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(values)


def _case(
    scene: str, size: str, kinds: str, names: list[str], seconds: float, rounds: int, short: list[str]
) -> dict[str, float]:
    """Median frames per second by contestant; ``short`` gets a line for each that cannot start."""
    arguments = ["--scene", scene, "--side", size, "--kinds", kinds, "--seconds", str(seconds)]
    with ThreadPoolExecutor(2) as pool:
        starting = {name: pool.submit(_Team, name, arguments) for name in names}
    teams: dict[str, _Team] = {}
    for name, start in starting.items():
        try:
            teams[name] = start.result()
        except PeerMissingError as error:
            short.append(f"{scene} {size} {kinds}: absent: {error}")
    values: dict[str, list[float]] = {name: [] for name in teams}
    try:
        for _ in range(rounds):
            for name, team in teams.items():
                values[name].append(team.measure())
    finally:
        for team in teams.values():
            for worker in team.workers:
                worker.close()
    return {name: statistics.median(rates) for name, rates in values.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--scene", action="append", choices=[*SCENES, "table"])
    parser.add_argument(
        "--size", action="append", choices=[*(f"{height}x{width}" for height, width in SIZES), *TABLE_BARS]
    )
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="only this one; may be repeated")
    parser.add_argument("--kinds", choices=list(KINDS), help="only these images")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.worker, options.scene[0], options.side, options.kinds, options.seconds)
        return 0
    kinds = [options.kinds] if options.kinds else list(KINDS)
    if options.scene == ["table"]:
        short = table_shortfalls(options.quick)
    else:
        short = robot_shortfalls(options.quick, options.scene, options.size, options.peer, kinds)
    for line in short:
        print("short:", line)
    return 1 if options.check and short else 0


def robot_shortfalls(
    quick: bool,
    scenes: Sequence[str] | None = None,
    wanted: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    all_kinds: Sequence[str] = tuple(KINDS),
) -> list[str]:
    """Print the table as it is measured; every bar that does not hold and every absent peer, in words."""
    sizes = [f"{height}x{width}" for height, width in SIZES]
    scenes = scenes or (["aloha"] if quick else list(SCENES))
    wanted = wanted or (sizes[:1] if quick else sizes)
    peers = peers or (PEERS[:1] if quick else PEERS)
    seconds, rounds = (0.4, 3) if quick else (0.7, 5)
    short: list[str] = []
    print("| scene | size | kinds | contestant | frames/s | headrace, fixed, is | bar |\n|---|---|---|---|---|---|---|")
    for scene in scenes:
        for size in wanted:
            for kinds in all_kinds:
                # the other peers draw rgb only
                names = ["headrace fixed", *(["headrace moving"] if kinds == "rgb" else [])]
                names += [peer for peer in peers if kinds == "rgb" or peer == "egl fair"]
                rates = _case(scene, size, kinds, names, seconds, rounds, short)
                fair, fixed = rates.get("egl fair"), rates.get("headrace fixed", float("nan"))
                for name, rate in rates.items():
                    bar = BARS.get((kinds, name.removeprefix("headrace "))) if fair else None
                    least = f"{bar[sizes.index(size)]:g}" if bar else ""
                    times = f"{rate / fair:.1f} × egl fair" if bar and fair else f"{fixed / rate:.1f} ×"
                    print(f"| {scene} | {size} | {kinds} | {name} | {rate:,.0f} | {times} | {least} |", flush=True)
                    if bar and fair and rate / fair < bar[sizes.index(size)]:
                        short.append(f"{scene} {size} {kinds}, {name}: {times}, expected {least}")
    return short


def table_shortfalls(quick: bool) -> list[str]:
    """Print the table of part (f); every bar that does not hold and every absent peer, in words."""
    short: list[str] = []
    print("| two textured cameras | contestant | pairs of frames/s | × egl fair | bar |\n|---|---|---|---|---|")
    for size, least in list(TABLE_BARS.items())[: 1 if quick else None]:
        seconds, rounds = (0.4, 3) if quick else (0.7, 5)
        rates = _case("table", size, "rgb", ["headrace fixed", "headrace moving", "egl fair"], seconds, rounds, short)
        fair = rates.get("egl fair", float("nan"))
        for name, rate in rates.items():
            bar = f"{least:g}" if name == "headrace fixed" else ""
            print(f"| {size} | {name} | {rate:,.0f} | {rate / fair:.1f} | {bar} |", flush=True)
            if bar and not rate / fair >= least:
                short.append(f"{size}, two textured cameras: {rate / fair:.1f} × egl fair, expected {bar}")
    return short


if __name__ == "__main__":
    sys.exit(main())
