"""Part (e) of the vision benchmark: cameras on robots made of meshes, against MuJoCo's EGL renderer.

  headrace     NativeCamera, poses included, two threads
  egl          mujoco.Renderer in two processes as a user gets it: shadows, reflections, four samples per pixel
  egl fair     the same without shadows, reflections and antialiasing, which NativeCamera leaves out by default

16 environments in different poses; frames per second. "moving" draws without static layers, as for a camera that moves.

  python benchmarks/vision_robots.py            the whole table (gym-aloha and metaworld: pip install --no-deps …)
  python benchmarks/vision_robots.py --quick    ALOHA at 84 x 84, under a minute once kernels are compiled
  python benchmarks/vision_robots.py --check    exit 1 and name each bar that falls short
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SCENES = {
    "aloha": ("gym_aloha", "assets/bimanual_viperx_transfer_cube.xml", "top"),
    "sawyer": ("metaworld", "assets/sawyer_xyz/sawyer_pick_place_v3.xml", "corner"),
}
SIZES = ((84, 84), (224, 224), (480, 640))
EVERYTHING = ("rgb", "depth", "segmentation")
BARS = {
    ("rgb", "fixed"): (10.0, 7.0, 3.5),
    ("rgb+depth+seg", "fixed"): (20.0, 15.0, 10.0),
    ("rgb", "moving"): (7.0, 4.0, 1.5),
}
"""At least so many times the fair EGL, by size."""
ENVS = 16


def load(scene: str) -> tuple[Any, str, np.ndarray]:
    """Model, camera and float64 (ENVS, nq) positions near the model's own."""
    import mujoco

    package, path, camera = SCENES[scene]
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{package} is not installed; run: pip install --no-deps gym-aloha metaworld")
    model = mujoco.MjModel.from_xml_path(str(Path(found.submodule_search_locations[0]) / path))
    rng = np.random.default_rng(0)
    qpos = np.tile(model.qpos0, (ENVS, 1))
    for joint in range(model.njnt):
        at, hinge = model.jnt_qposadr[joint], model.jnt_type[joint] == int(mujoco.mjtJoint.mjJNT_HINGE)
        if model.jnt_type[joint] >= int(mujoco.mjtJoint.mjJNT_SLIDE):
            qpos[:, at] += rng.normal(size=ENVS) * (0.2 if hinge else 0.01)
    return model, camera, qpos


def rate(draw: Callable[[], None], frames: int, seconds: float) -> float:
    """Median frames per second of calls that draw so many."""
    draw()
    draw()
    rates, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates) < 3:
        start = time.perf_counter()
        draw()
        rates.append(frames / (time.perf_counter() - start))
    return statistics.median(rates)


def headrace_rate(scene: str, height: int, width: int, kinds: tuple[str, ...], layers: bool, seconds: float) -> float:
    """NativeCamera on two threads."""
    from headrace.sim import CameraFrames, CameraSpec, NativeCamera, PoseReader

    model, name, qpos = load(scene)
    spec = CameraSpec(name=name, width=width, height=height, data_types=kinds)  # type: ignore[arg-type]
    camera, reader = NativeCamera(model, spec, threads=2, layers=layers), PoseReader(model, threads=2)
    out = CameraFrames.empty(spec, ENVS)
    return rate(lambda: camera.render(reader.read(qpos), out) and None, ENVS, seconds)


def _egl(scene: str, height: int, width: int, kinds: tuple[str, ...], fair: bool, seconds: float, queue: Any) -> None:
    import os

    os.environ["MUJOCO_GL"] = "egl"
    import mujoco

    model, name, qpos = load(scene)
    model.vis.global_.offwidth, model.vis.global_.offheight = max(640, width), max(480, height)
    if fair:
        model.vis.quality.offsamples = 0
    data, renderer = mujoco.MjData(model), mujoco.Renderer(model, height, width)
    flags = renderer.scene.flags
    if fair:
        flags[mujoco.mjtRndFlag.mjRND_SHADOW] = flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0

    def draw() -> None:
        for row in qpos[: ENVS // 2]:
            data.qpos[:] = row
            mujoco.mj_fwdPosition(model, data)
            renderer.update_scene(data, name)
            assert renderer.render().any(), "a blank picture"
            if "depth" in kinds:
                renderer.enable_depth_rendering()
                renderer.render()
                renderer.disable_depth_rendering()
                renderer.enable_segmentation_rendering()
                renderer.render()
                renderer.disable_segmentation_rendering()

    queue.put(rate(draw, ENVS // 2, seconds))


def egl_rate(scene: str, height: int, width: int, kinds: tuple[str, ...], fair: bool, seconds: float) -> float:
    """MuJoCo's renderer in two processes at the same time."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = (scene, height, width, kinds, fair, seconds, queue)
    processes = [context.Process(target=_egl, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    total = sum(queue.get(timeout=600) for _ in processes)
    for process in processes:
        process.join()
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    scenes, sizes = (["aloha"], SIZES[:1]) if options.quick else (list(SCENES), SIZES)
    seconds = 1.0 if options.quick else 4.0
    short: list[str] = []
    print("scene   size     kinds          camera  headrace  egl fair  egl default  times fair")
    for scene in scenes:
        for place, (height, width) in enumerate(sizes):
            for (kinds, motion), bars in BARS.items():
                wanted = ("rgb",) if kinds == "rgb" else EVERYTHING
                ours = headrace_rate(scene, height, width, wanted, motion == "fixed", seconds)
                fair = egl_rate(scene, height, width, wanted, True, seconds)
                default = float("nan") if options.quick else egl_rate(scene, height, width, wanted, False, seconds)
                case = f"{scene:7s} {height}x{width:<5d}{kinds:14s} {motion:7s}"
                print(f"{case} {ours:8.0f}  {fair:8.0f}  {default:11.0f}  {ours / fair:9.1f}", flush=True)
                if ours / fair < bars[place]:
                    short.append(f"{case}: {ours / fair:.1f} times the fair EGL, expected {bars[place]}")
    for line in short:
        print("SHORT", line)
    return 1 if options.check and short else 0


if __name__ == "__main__":
    sys.exit(main())
