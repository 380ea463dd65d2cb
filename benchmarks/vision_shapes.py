"""Rays or triangles for primitives: the same heap of shapes as exact primitives and as meshes, through one camera.

  rays      NativeCamera's way: each primitive is met by exact rays, a line of pixels at a time
  coarse    meshes as finely cut as MuJoCo's renderer cuts by default (28 slices, 16 stacks) through the rasterizer
  fine      64 slices, 32 stacks: as far from the true surface as a twentieth of a millimeter for a ball of 4 cm

12 balls, capsules, cylinders, ellipsoids and boxes lie around on a floor; 64 environments in different poses, all of
it drawn every time (no static layer), one thread and two. "off" is the share of pixels whose geom differs from the
rays', "depth" the 99th percentile of the depth's relative error in the others.

  python benchmarks/vision_shapes.py            the table
  python benchmarks/vision_shapes.py --quick    64 and 128 pixels, short rounds
  python benchmarks/vision_shapes.py --check    exit 1 where triangles are both faster and within 0.1 % of the rays
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CUTS = {"rays": None, "coarse": (28, 16), "fine": (64, 32)}
KINDS = ("sphere", "capsule", "cylinder", "ellipsoid", "box")
SHAPES, ROWS = 12, 64


def _vertices(kind: str, size: tuple[float, ...], slices: int, stacks: int) -> np.ndarray:
    """Points whose hull is the tessellated primitive."""
    turn = 2 * np.pi * np.arange(slices) / slices
    if kind == "box":
        return np.array([(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]) * size
    circle = np.stack([np.cos(turn), np.sin(turn), np.zeros(slices)], 1)
    if kind == "cylinder":
        return np.concatenate([circle * size[0] + (0, 0, end * size[1]) for end in (-1, 1)])
    rise = np.pi * (np.arange(1, stacks) / stacks - 0.5)
    ball = np.concatenate([circle * np.cos(a) + (0, 0, np.sin(a)) for a in rise] + [[(0, 0, -1), (0, 0, 1)]])
    if kind == "ellipsoid":
        return ball * size
    if kind == "sphere":
        return ball * size[0]
    ends = [ball[end * ball[:, 2] > -1e-9] * size[0] + (0, 0, end * size[1]) for end in (-1, 1)]
    return np.concatenate(ends)


def scene(cut: tuple[int, int] | None) -> Any:
    """The model of the heap, as primitives or cut into triangles."""
    import mujoco

    rng, meshes, bodies = np.random.default_rng(0), "", ""
    for k in range(SHAPES):
        kind, size = KINDS[k % len(KINDS)], tuple(rng.uniform(0.04, 0.1, 3))
        rgba = " ".join(f"{c:.3f}" for c in rng.uniform(0.2, 1, 3))
        if cut is None:
            shape = f'type="{kind}" size="{" ".join(map(str, size))}"'
        else:
            points = " ".join(f"{v:.9g}" for v in _vertices(kind, size, *cut).ravel())
            meshes += f'<mesh name="m{k}" vertex="{points}" smoothnormal="true"/>'
            shape = f'type="mesh" mesh="m{k}"'
        bodies += f'<body><freejoint/><geom {shape} rgba="{rgba} 1" contype="0" conaffinity="0"/></body>'
    return mujoco.MjModel.from_xml_string(
        f"""<mujoco><statistic extent="2" center="0 0 0"/><asset>{meshes}</asset><worldbody>
        <light pos="0 0 2"/><geom type="plane" size="2 2 0.1" rgba="0.4 0.5 0.6 1"/>{bodies}
        <camera name="c" pos="0 -0.9 0.7" xyaxes="1 0 0 0 0.6 0.8"/></worldbody></mujoco>"""
    )


def _drawer(cut: tuple[int, int] | None, pixels: int, threads: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Draw colors; draw depth and geom ids."""
    from headrace.sim import CameraSpec, NativeCamera
    from headrace.sim.camera.camera import PoseReader

    model, rng = scene(cut), np.random.default_rng(1)
    qpos = np.zeros((ROWS, SHAPES, 7))
    qpos[..., :3] = rng.uniform((-0.5, -0.4, 0.05), (0.5, 0.4, 0.3), (ROWS, SHAPES, 3))
    qpos[..., 3:] = rng.normal(size=(ROWS, SHAPES, 4))
    qpos[..., 3:] /= np.linalg.norm(qpos[..., 3:], axis=-1, keepdims=True)
    poses = PoseReader(model).read(qpos.reshape(ROWS, -1))
    side: dict[str, Any] = {"name": "c", "width": pixels, "height": pixels}
    colors = NativeCamera(model, CameraSpec(**side), threads=threads, layers=False)
    both = NativeCamera(model, CameraSpec(**side, data_types=("depth", "segmentation")), layers=False)
    return lambda: colors.render(poses), lambda: both.render(poses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    seconds, rounds = (0.15, 5) if options.quick else (0.4, 9)
    replaceable: list[str] = []
    print("| pixels | threads | form | frames/s | × rays | off | depth |\n|---|---|---|---|---|---|---|")
    for pixels in (64, 128) if options.quick else (64, 128, 256):
        for threads in (1, 2):
            drawers = {name: _drawer(cut, pixels, threads) for name, cut in CUTS.items()}
            truth = drawers["rays"][1]()
            rates: dict[str, list[float]] = {name: [] for name in CUTS}
            for turn in range(rounds + 1):
                for name, (draw, _) in drawers.items():
                    count, start = 0, time.perf_counter()
                    while (spent := time.perf_counter() - start) < (seconds if turn else 0.01):
                        draw()
                        count += ROWS
                    if turn:  # the first one compiles
                        rates[name].append(count / spent)
            for name, (_, measure) in drawers.items():
                seen = measure()
                same = seen.segmentation == truth.segmentation
                error = float(np.percentile(np.abs(seen.depth / truth.depth - 1)[same], 99))
                times = statistics.median(a / b for a, b in zip(rates[name], rates["rays"], strict=True))
                rate = statistics.median(rates[name])
                cells = (
                    f"{pixels} | {threads} | {name} | {rate:,.0f} | {times:.2f} | {1 - same.mean():.2%} | {error:.1e}"
                )
                print(f"| {cells} |")
                if name != "rays" and times >= 1 and error <= 1e-3:
                    replaceable.append(f"{pixels} pixels, {threads} threads: {name} is {times:.2f} × rays")
    for line in replaceable:
        print("triangles would do:", line)
    return 1 if options.check and replaceable else 0


if __name__ == "__main__":
    sys.exit(main())
