"""Compare the native camera with MuJoCo's renderer on the models of other packages and on random scenes.

    python scripts/compare_pictures.py DIRECTORY [DIRECTORY ...]     # every MJCF file below that compiles
    python scripts/compare_pictures.py --random 40

needs EGL. A model without a camera gets one that looks at its center. Prints a line per camera that differs, with its
causes, and a summary; exits with 1 if more than ``--allow`` cameras differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from headrace.testing import check_camera

_SIZE = 96


def load(path: Path) -> mujoco.MjModel | None:
    """Compile a file, with a camera if it has none; None where it is part of another, or has nothing to see."""
    try:
        spec = mujoco.MjSpec.from_file(str(path))
        model = spec.compile()
        if model.ngeom == 0 or model.ncam > 0:
            return model if model.ngeom else None
        center, extent = model.stat.center, max(float(model.stat.extent), 1e-3)
        back = np.array([0.7, -1.0, 0.6]) / np.linalg.norm([0.7, -1.0, 0.6])
        right = np.cross([0, 0, 1], back)
        right /= np.linalg.norm(right)
        axes = np.stack([right, np.cross(back, right), back], 1)
        quat = np.empty(4)
        mujoco.mju_mat2Quat(quat, axes.ravel())
        spec.worldbody.add_camera(name="check", pos=center + 1.6 * extent * back, quat=quat)
        return spec.compile()
    except (ValueError, RuntimeError, FileNotFoundError):
        return None


def models(given: argparse.Namespace) -> Iterator[tuple[str, str, mujoco.MjModel]]:
    """Source, name and model of everything to draw."""
    if given.random:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sim"))
        from random_scenes import scene

        for number in range(given.random):
            yield "random scenes", str(number), mujoco.MjModel.from_xml_string(scene(number))
    for directory in given.directories:
        for path in sorted(Path(directory).rglob("*.xml")):
            model = load(path)
            if model is not None:
                yield directory, str(path.relative_to(directory)), model


def main() -> int:
    """Draw everything, print what differs and a table with a line per source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*")
    parser.add_argument("--random", type=int, default=0, help="random scenes of the tests")
    parser.add_argument("--allow", type=int, default=0, help="cameras that may differ")
    parser.add_argument("--most", type=int, default=2, help="cameras per model")
    given = parser.parse_args()
    found: dict[str, list[list[Any]]] = {}
    for source, name, model in models(given):
        checks = list[Any]()
        for k in range(min(model.ncam, given.most)):
            checks += check_camera(model, camera=model.camera(k).name, width=_SIZE, height=_SIZE)
            if not checks[-1].agrees:
                print(f"{source} {name}: {checks[-1]}", flush=True)
        found.setdefault(source, []).append(checks)
    print("| source | models | cameras | segmentation differs | depth differs | color differs | mean color |")
    print("|---|---|---|---|---|---|---|")
    differing = 0
    for source, per_model in found.items():
        drawn = [check for checks in per_model for check in checks]
        wrong = [
            sum(check.segmentation > 0.002 for check in drawn),
            sum(check.depth > 0.002 for check in drawn),
            sum(check.rgb > 0.05 or check.mean_color > 2 for check in drawn),
        ]
        mean = np.mean([check.mean_color for check in drawn] or [0])
        print(
            f"| {source} | {len(per_model)} | {len(drawn)} | {' | '.join(map(str, wrong))} | {mean:.2f} |", flush=True
        )
        differing += sum(not check.agrees for check in drawn)
    return int(differing > given.allow)


if __name__ == "__main__":
    sys.exit(main())
