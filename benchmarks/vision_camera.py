"""Cameras on the CPU: pictures per second from joint positions to uint8 pixels in host memory.

Every contestant draws the cartpole of the task ``cartpole-camera`` for 64 environments, without shadows, reflections
and antialiasing, in the fastest form it has. Each runs in a process of its own, warm, measured in turn, and the peers
also as two processes that share the environments:

  headrace        NativeCamera, poses included, two threads
  egl, osmesa     MuJoCo's renderer, a picture at a time ("naive") or as tiles of one buffer that is read once ("tiled")
  mujoco-warp     create_render_context and render; "lean" leaves out all that it lets one leave out
  newton          SensorCamera without shadows and textures

EGL and OSMesa are Mesa's software renderers here (Debian: libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6). "half"
draws every second environment.

  python benchmarks/vision_camera.py            the whole table
  python benchmarks/vision_camera.py --quick    64 px, fewer rounds
  python benchmarks/vision_camera.py --size 128 one size, without the textured scene; may be repeated
  python benchmarks/vision_camera.py --check    exit 1 and name each bar that falls short

Bars: at least 6 times the fastest peer at 64 px, 4 times at 128 px, 3 times at 256 px; half of the environments in at
most 0.6 of the time; rgb, depth and segmentation in one pass in at most 1.3 of the time of rgb.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from interleaved import PeerMissingError, Worker, python_of, serve

ENVS = 64
TWO_THREADS = {"OMP_NUM_THREADS": "2", "HEADRACE_NUM_THREADS": "2"}
SCENE = Path(__file__).resolve().parent.parent / "src/headrace/envs/tasks/assets/cartpole.xml"
CAMERA = "side"
TEXTURES = """<asset>
  <texture name="sky" type="skybox" builtin="gradient" rgb1="0.4 0.6 0.8" rgb2="0 0 0" width="256" height="1536"/>
  <texture name="grid" type="2d" builtin="checker" rgb1="0.1 0.2 0.3" rgb2="0.2 0.3 0.4" width="256" height="256"/>
  <material name="grid" texture="grid" texrepeat="5 5"/></asset><worldbody>"""
PEERS = ("egl naive", "egl tiled", "osmesa naive", "osmesa tiled", "mujoco-warp", "mujoco-warp lean", "newton")
TEXTURED_PEERS = ("egl tiled", "osmesa tiled", "mujoco-warp")
BARS = {64: 6.0, 128: 4.0, 256: 3.0}
HALF_BAR = 0.6
KINDS = {"all, depth": "depth", "all, rgb + depth + segmentation": "rgb,depth,segmentation"}
"""Other images than rgb, by what the table calls them; their time over that of rgb has a bar for the last."""
KINDS_BAR = 1.3


@dataclass(frozen=True)
class CameraRow:
    """One line of the table; ``frames_per_s`` is the median over rounds, or None where the contestant is absent."""

    scene: str
    pixels: int
    renderer: str
    processes: int
    envs: str
    frames_per_s: float | None
    of_best: float | None
    """headrace: its speed over the fastest peer's; ``half`` and other kinds: the time over that of all, rgb."""
    peak_mb: float | None
    note: str = ""


class _Team:
    """A contestant as one or more processes that draw at the same time; their speeds add up."""

    def __init__(self, name: str, processes: int, arguments: Sequence[str]) -> None:
        self.name, self.processes = name, processes
        python = str(python_of(".venv" if name == "headrace" else ".venv-bench-sim"))
        command = [python, os.path.abspath(__file__), "--worker", name, *arguments]
        environment = TWO_THREADS if name == "headrace" else {}
        if name.startswith(("egl", "osmesa")):
            environment = {"MUJOCO_GL": name.split()[0], "PYOPENGL_PLATFORM": name.split()[0]}
        self._workers: list[Worker] = []
        try:
            for _ in range(processes):
                self._workers.append(Worker(name, command, environment))
        except PeerMissingError:
            self.close()
            raise
        self.peak_mb = sum(worker.ready["peak_mb"] for worker in self._workers)

    def measure(self) -> float:
        values: list[float] = []
        threads = [threading.Thread(target=lambda w=w: values.append(w.measure())) for w in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(values)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def camera_rows(quick: bool, sizes: Sequence[int] | None = None) -> list[CameraRow]:
    """Measure part (a) of the vision benchmark: every size, or some, without the textured scene."""
    rounds, seconds = (3, 0.1) if quick else (5, 0.4)
    rows: list[CameraRow] = []
    for pixels in sizes or ((64,) if quick else tuple(BARS)):
        rows += _case("cartpole", pixels, PEERS, rounds, seconds)
    if not quick and not sizes:
        rows += _case("cartpole, checker and sky", 64, TEXTURED_PEERS, rounds, seconds)
    return rows


def camera_checks(rows: list[CameraRow]) -> list[str]:
    """What falls short of the bars, in words; empty where every bar holds."""
    failures = [f"{row.renderer} × {row.processes}, {row.pixels} px: absent: {row.note}" for row in rows if row.note]
    for row in rows:
        if row.renderer != "headrace" or row.scene != "cartpole" or row.of_best is None:
            continue
        if row.envs == "all" and row.pixels in BARS and row.of_best < BARS[row.pixels]:
            failures.append(f"{row.pixels} px: {row.of_best:.2f} of the fastest peer, bar ≥ {BARS[row.pixels]:g}")
        if row.envs == "half" and row.pixels in BARS and row.of_best > HALF_BAR:
            failures.append(f"{row.pixels} px, half: {row.of_best:.2f} of the time of all, bar ≤ {HALF_BAR:g}")
        if row.envs == list(KINDS)[-1] and row.of_best > KINDS_BAR:
            failures.append(f"{row.pixels} px, three kinds: {row.of_best:.2f} of the time of rgb, bar ≤ {KINDS_BAR:g}")
    return failures


def _case(scene: str, pixels: int, peers: Sequence[str], rounds: int, seconds: float) -> list[CameraRow]:
    wanted = [("headrace", 1, envs) for envs in ("all", "half", *KINDS)]
    wanted += [(peer, processes, "all") for peer in peers for processes in (1, 2)]

    def start(name: str, processes: int, envs: str) -> _Team | CameraRow:
        arguments = ["--pixels", str(pixels), "--envs", str(ENVS // processes), "--seconds", str(seconds)]
        arguments += ["--half"] if envs == "half" else []
        arguments += ["--kinds", KINDS[envs]] if envs in KINDS else []
        arguments += ["--textured"] if scene != "cartpole" else []
        try:
            return _Team(name, processes, arguments)
        except PeerMissingError as error:
            return CameraRow(scene, pixels, name, processes, envs, None, None, None, str(error))

    with ThreadPoolExecutor(4) as pool:
        started = [
            (team, envs) for team, (_, _, envs) in zip(pool.map(lambda w: start(*w), wanted), wanted, strict=True)
        ]
    teams = [(team, envs) for team, envs in started if isinstance(team, _Team)]
    absent = [row for row, _ in started if isinstance(row, CameraRow)]
    try:
        values: list[list[float]] = [[] for _ in teams]
        for i in range(rounds):
            order = range(len(teams)) if i % 2 == 0 else reversed(range(len(teams)))
            for k in order:
                values[k].append(teams[k][0].measure())
    finally:
        for team, _ in teams:
            team.close()
    # ratios within a round, then their median: what slows a whole round down cancels
    fastest = [
        max((values[k][i] for k, (team, _) in enumerate(teams) if team.name != "headrace"), default=0.0)
        for i in range(rounds)
    ]
    ours = next((values[k] for k, (team, envs) in enumerate(teams) if team.name == "headrace" and envs == "all"), None)
    rows: list[CameraRow] = []
    for k, (team, envs) in enumerate(teams):
        ratio = None
        if team.name == "headrace" and ours is not None and envs == "half":
            # half the pictures at a speed of v take (n/2)/v
            ratio = statistics.median(0.5 * a / b for a, b in zip(ours, values[k], strict=True))
        elif ours is not None and envs in KINDS:
            ratio = statistics.median(a / b for a, b in zip(ours, values[k], strict=True))
        elif team.name == "headrace" and all(fastest):
            ratio = statistics.median(a / b for a, b in zip(values[k], fastest, strict=True))
        speed = statistics.median(values[k])
        rows.append(CameraRow(scene, pixels, team.name, team.processes, envs, speed, ratio, team.peak_mb))
    return rows + absent


# The workers' side: a function per contestant that returns "draw all environments once, give uint8 pixels".


def _scene_xml(textured: bool) -> str:
    xml = SCENE.read_text()
    if textured:
        xml = xml.replace("<worldbody>", TEXTURES).replace('rgba="0.24 0.29 0.36 1"', 'material="grid"')
    return xml


def _positions(envs: int) -> Any:
    import numpy as np

    rng = np.random.default_rng(0)
    return np.stack([rng.uniform(-1.5, 1.5, envs), rng.uniform(-0.6, 0.6, envs)], 1)


def _headrace(pixels: int, envs: int, textured: bool, half: bool, kinds: tuple[Any, ...]) -> Callable[[], Any]:
    from headrace.sim import CameraSpec
    from headrace.sim.camera.camera import CameraFrames, PoseReader
    from headrace.sim.camera.native_camera import NativeCamera
    from headrace.sim.mujoco_api import load_model

    model = load_model(_scene_xml(textured))
    spec = CameraSpec(name=CAMERA, width=pixels, height=pixels, data_types=kinds)
    camera, reader, qpos = NativeCamera(model, spec, threads=2), PoseReader(model, threads=2), _positions(envs)
    rows = slice(None, None, 2) if half else slice(None)
    out = CameraFrames.empty(spec, len(qpos[rows]))
    return lambda: getattr(camera.render(reader.read(qpos[rows]), out), kinds[0])


def _opengl(pixels: int, envs: int, textured: bool, tiled: bool) -> Callable[[], Any]:
    import mujoco
    import numpy as np
    from mujoco.rendering.classic import gl_context

    model = mujoco.MjModel.from_xml_string(_scene_xml(textured))
    columns = int(np.ceil(np.sqrt(envs))) if tiled else 1
    lines = -(-envs // columns) if tiled else 1
    width, height = columns * pixels, lines * pixels
    model.vis.global_.offwidth, model.vis.global_.offheight = width, height
    model.vis.quality.offsamples = 0
    gl = gl_context.GLContext(width, height)
    gl.make_current()
    context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50.value)
    mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, context)
    scene, option, view = mujoco.MjvScene(model, 100), mujoco.MjvOption(), mujoco.MjvCamera()
    scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
    view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, model.camera(CAMERA).id
    data, qpos = mujoco.MjData(model), _positions(envs)
    whole = mujoco.MjrRect(0, 0, width, height)
    rects = [mujoco.MjrRect(i % columns * pixels, i // columns * pixels, pixels, pixels) for i in range(envs)]
    frames = np.empty((envs, pixels, pixels, 3), np.uint8)
    sheet = np.empty((height, width, 3), np.uint8)

    def draw() -> Any:
        for i in range(envs):
            data.qpos[:] = qpos[i]
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            mujoco.mj_camlight(model, data)
            mujoco.mjv_updateScene(model, data, option, None, view, mujoco.mjtCatBit.mjCAT_ALL.value, scene)
            mujoco.mjr_render(rects[i] if tiled else whole, scene, context)
            if not tiled:
                mujoco.mjr_readPixels(sheet, None, whole, context)
                frames[i] = sheet[::-1]
        if tiled:
            mujoco.mjr_readPixels(sheet, None, whole, context)
            tiles = sheet.reshape(lines, pixels, columns, pixels, 3)[:, ::-1].swapaxes(1, 2)
            frames[:] = tiles.reshape(-1, pixels, pixels, 3)[:envs]
        return frames

    draw.keep = gl  # the context must outlive the function
    return draw


def _mujoco_warp(pixels: int, envs: int, textured: bool, lean: bool) -> Callable[[], Any]:
    import mujoco
    import mujoco_warp as mjw
    import numpy as np
    import warp as wp

    wp.config.quiet = True
    model = mujoco.MjModel.from_xml_string(_scene_xml(textured))
    data, qpos = mujoco.MjData(model), _positions(envs)
    mujoco.mj_forward(model, data)
    m, d = mjw.put_model(model), mjw.put_data(model, data, nworld=envs)
    fewer = {"use_textures": False, "enable_specular": False, "enable_emission": False, "enable_vertex_normals": False}
    context = mjw.create_render_context(
        model, nworld=envs, cam_res=(pixels, pixels), render_rgb=True, render_depth=False, render_seg=False,
        cam_active=[CAMERA], render_skybox=textured, **(fewer if lean else {}),
    )  # fmt: skip
    positions = qpos.astype(np.float32)

    def draw() -> Any:
        d.qpos.assign(positions)
        mjw.kinematics(m, d)
        mjw.com_pos(m, d)
        mjw.camlight(m, d)
        mjw.refit_bvh(m, d, context)
        mjw.render(m, d, context)
        packed = context.rgb_data.numpy().reshape(envs, pixels, pixels)
        return packed.view(np.uint8).reshape(envs, pixels, pixels, 4)[..., :3]

    return draw


def _newton(pixels: int, envs: int) -> Callable[[], Any]:
    import math

    import mujoco
    import newton
    import numpy as np
    import warp as wp
    from newton.sensors import SensorCamera

    wp.config.quiet = True
    one = newton.ModelBuilder()
    one.add_mjcf(str(SCENE))
    builder = newton.ModelBuilder()
    builder.replicate(one, envs)
    model = builder.finalize(device="cpu")
    state = model.state()
    camera = SensorCamera(
        model, default_render_config=SensorCamera.RenderConfig(enable_shadows=False, enable_textures=False)
    )
    camera.create_default_light(enable_shadows=False)
    reference = mujoco.MjModel.from_xml_path(str(SCENE))
    data = mujoco.MjData(reference)
    mujoco.mj_forward(reference, data)
    number = reference.camera(CAMERA).id
    quat = np.empty(4)
    mujoco.mju_mat2Quat(quat, data.cam_xmat[number])
    pose = np.array([*data.cam_xpos[number], *quat[1:], quat[0]], np.float32)
    transforms = wp.array(np.tile(pose, (envs, 1)), dtype=wp.transformf, device="cpu")
    fov = math.radians(reference.cam_fovy[number])
    rays = SensorCamera.compute_camera_rays_pinhole(pixels, pixels, camera_fov=fov, device="cpu")
    color = camera.allocate_image_color(envs, pixels, pixels)
    joints = _positions(envs).astype(np.float32).ravel()

    def draw() -> Any:
        model.joint_q.assign(joints)
        newton.eval_fk(model, model.joint_q, model.joint_qd, state)
        model.bvh_refit_shapes(state)
        camera.update(state, transforms, rays, color_image=color)
        return color.numpy().view(np.uint8).reshape(envs, pixels, pixels, 4)[..., :3]

    return draw


def _worker(arguments: argparse.Namespace) -> None:
    name, pixels, envs, textured = arguments.worker, arguments.pixels, arguments.envs, arguments.textured
    if name == "headrace":
        draw = _headrace(pixels, envs, textured, arguments.half, tuple(arguments.kinds.split(",")))
    elif name == "newton":
        draw = _newton(pixels, envs)
    elif name.startswith("mujoco-warp"):
        draw = _mujoco_warp(pixels, envs, textured, name.endswith("lean"))
    else:
        draw = _opengl(pixels, envs, textured, name.endswith("tiled"))
    frames = draw()
    if frames.std() < frames.mean() / 50 or len({frame.tobytes() for frame in frames}) < len(frames) // 2:
        raise SystemExit(f"{name}: blank or equal pictures: nothing to measure")

    def measure() -> float:
        count, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < arguments.seconds:
            count += len(draw())
        return count / spent

    measure()
    serve({"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}, measure)


def camera_table(rows: list[CameraRow]) -> tuple[Any, list[str]]:
    """The rows for a terminal, and as lines of Markdown."""
    from rich.table import Table

    heads = ["scene", "px", "renderer", "processes", "envs", "frames/s", "× best peer; half, kinds: × time", "peak MB"]
    table = Table(title="(a) cameras, 64 environments, two cores")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for head in heads:
        table.add_column(head)
    for row in rows:
        cells = [
            row.scene,
            str(row.pixels),
            row.renderer,
            str(row.processes),
            row.envs,
            "absent" if row.frames_per_s is None else f"{row.frames_per_s:,.0f}",
            "" if row.of_best is None else f"{row.of_best:.2f}",
            "" if row.peak_mb is None else f"{row.peak_mb:.0f}",
        ]
        table.add_row(*cells)
        lines.append("| " + " | ".join(cells) + " |")
    return table, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 px, fewer rounds")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar falls short")
    parser.add_argument("--size", type=int, action="append", choices=list(BARS), help="only this one; may be repeated")
    parser.add_argument("--markdown", help="also write the table to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--pixels", type=int, default=64, help=argparse.SUPPRESS)
    parser.add_argument("--envs", type=int, default=ENVS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.3, help=argparse.SUPPRESS)
    parser.add_argument("--half", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kinds", default="rgb", help=argparse.SUPPRESS)
    parser.add_argument("--textured", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _worker(arguments)
        return 0
    from rich.console import Console

    rows = camera_rows(arguments.quick, arguments.size)
    table, lines = camera_table(rows)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    failures = camera_checks(rows)
    for failure in failures:
        print(f"short: {failure}")
    if arguments.markdown:
        Path(arguments.markdown).write_text("\n".join(lines) + "\n")
    if arguments.check:
        print("--check failed" if failures else "--check passed: every bar holds")
        return 1 if failures else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
