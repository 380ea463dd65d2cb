"""Kernels compiled by other processes are found on disk, and whatever happens to those processes, results are right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import numpy as np
from headrace._kernels import ahead
from headrace.sim.camera._render_frames import copy_depth, to_gray

lines, z = np.array([[[0, 2], [1, 2]]], np.int32), np.arange(4, dtype=np.float32).reshape(1, 2, 2)
out, gray = np.full((1, 2, 2), 9, np.float32), np.empty(1, np.uint8)
calls = [(copy_depth, (lines, z, out)), (to_gray, (np.full((1, 3), 200, np.uint8), gray))]
if sys.argv[1] == "dies":
    ahead._SERVE = "raise SystemExit(1)"
if sys.argv[1] == "cannot":
    sys.executable = "/nowhere/python"
if sys.argv[1] == "warm":
    def refuse():
        raise AssertionError("everything is on disk: nobody to start")
    ahead._start = refuse
ahead.compile_ahead(calls)
for kernel, args in calls:
    kernel(*args)
assert out.tolist() == [[[0, 1], [9, 3]]] and gray[0] == 200, (out, gray)
print([sum(kernel.stats.cache_misses.values()) for kernel, _ in calls])
"""


def compiled_here(tmp_path: Path, how: str, threads: int = 2) -> list[int]:
    """How often the calling process compiled each of two kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "HEADRACE_NUM_THREADS": str(threads)}
    run = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return [int(word.strip("[],")) for word in run.stdout.split()]


def test_another_process_compiles_one_of_two_kernels_and_the_next_run_none(tmp_path: Path) -> None:
    assert sum(compiled_here(tmp_path, "cold")) == 1
    assert compiled_here(tmp_path, "warm") == [0, 0]


@pytest.mark.parametrize("how", ["dies", "cannot"])
def test_a_process_that_dies_or_cannot_start_leaves_its_kernel_to_the_caller(tmp_path: Path, how: str) -> None:
    assert compiled_here(tmp_path, how) == [1, 1]


def test_one_thread_compiles_everything_in_its_own_process(tmp_path: Path) -> None:
    assert compiled_here(tmp_path, "warm", threads=1) == [1, 1]


def test_a_camera_compiles_no_kernel_that_its_scene_and_kinds_do_not_need(monkeypatch) -> None:
    import mujoco

    from headrace.sim import CameraSpec, NativeCamera
    from headrace.sim.camera import native_camera
    from headrace.sim.camera.camera import PoseReader

    announced: list[str] = []
    monkeypatch.setattr(
        native_camera, "compile_ahead", lambda calls: announced.extend(k.py_func.__name__ for k, _ in calls)
    )

    def needs(shape: str, *kinds: str) -> set[str]:
        announced.clear()
        model = mujoco.MjModel.from_xml_string(
            f"""<mujoco><asset><mesh name="m" vertex="0 0 0 1 0 0 0 1 0 0 0 1"/></asset>
            <worldbody><geom {shape}/><camera name="c" pos="0 -3 1" xyaxes="1 0 0 0 0.3 1"/></worldbody></mujoco>"""
        )
        camera = NativeCamera(model, CameraSpec(name="c", width=4, height=4, data_types=kinds))  # type: ignore[arg-type]
        camera.render(PoseReader(model).read(model.qpos0[None].copy()))
        return set(announced)

    assert needs('size="0.2"', "depth") == {"place", "cast_primitives"}
    assert needs('type="mesh" mesh="m"', "segmentation") == {"place", "cast_triangles"}
    assert needs('size="0.2"', "gray") == {"place", "cast_primitives", "paint"}
    assert needs('size="0.2"', "normals") == {"place", "cast_primitives", "find_normals"}


@pytest.mark.parametrize("own_looks", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_camera_announces_exactly_the_forms_of_kernels_that_it_calls(rows: int, own_looks: bool, monkeypatch) -> None:
    import mujoco
    import numba
    import numpy as np

    from headrace.sim import CameraSpec, NativeCamera
    from headrace.sim.camera import native_camera
    from headrace.sim.camera.camera import PoseReader

    announced: list[tuple[object, tuple[object, ...]]] = []
    called: list[tuple[object, tuple[object, ...]]] = []

    def form(kernel, args):
        return kernel, tuple(numba.typeof(arg) for arg in args)

    class Watched:
        def __init__(self, kernel):
            self.kernel = kernel

        def __call__(self, *args):
            called.append(form(self.kernel, args))
            self.kernel(*args)

    kernels = ("place", "paint", "cast_primitives", "cast_triangles", "find_normals")
    for name in kernels:
        monkeypatch.setattr(native_camera, name, Watched(getattr(native_camera, name)))
    monkeypatch.setattr(
        native_camera, "compile_ahead", lambda calls: announced.extend(form(k.kernel, args) for k, args in calls)
    )
    model = mujoco.MjModel.from_xml_string(
        """<mujoco><asset><texture name="t" type="2d" builtin="checker" width="8" height="8"/>
        <material name="t" texture="t"/><mesh name="m" vertex="0 0 0 1 0 0 0 1 0 0 0 1"/></asset><worldbody>
        <light type="directional" castshadow="true" pos="0 0 3"/>
        <light type="directional" castshadow="true" pos="0 0 3" dir="0.3 0 -1"/>
        <geom type="plane" size="2 2 1" material="t"/><geom type="sphere" size="0.2" rgba="1 0 0 0.5"/>
        <body><freejoint/><geom type="mesh" mesh="m" material="t"/></body>
        <camera name="c" pos="0 -3 1" xyaxes="1 0 0 0 0.3 1"/></worldbody></mujoco>"""
    )
    spec = CameraSpec(
        name="c", width=12, height=9, data_types=("rgb", "depth", "segmentation", "normals"), shadows=True,
        specular=True,
    )  # fmt: skip
    looks = ("geom_rgba", "geom_size", "light_diffuse") if own_looks else ()
    fields = {name: np.stack([getattr(model, name).astype(float)] * rows) for name in looks}
    NativeCamera(model, spec).render(PoseReader(model).read(np.tile(model.qpos0, (rows, 1)), fields=fields))
    assert set(called) == set(announced)
    assert len(announced) == len(kernels), "each kernel in one form"
    given = [kind for _, kinds in called for kind in kinds]
    arrays = [part for kind in given for part in getattr(kind, "types", (kind,)) if hasattr(part, "layout")]
    assert {array.layout for array in arrays} == {"C"}, "the same form for any number of rows, with looks and without"
