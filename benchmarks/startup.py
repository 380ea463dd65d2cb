"""Waiting: seconds from the start of a process to the first step and to the first picture, cold and warm.

  step     the first ``ant`` step of one environment
             gymnasium      Ant-v5
             envpool        Ant-v4
  picture  the first 64 × 64 picture of ``cartpole-camera``
             gymnasium      InvertedPendulum-v5, render_mode="rgb_array" (needs OpenGL)
             mujoco-warp    its camera over the same model (compiles kernels, too)

Cold is an empty cache of compiled kernels, warm is the next process. Every contestant is a process of its own, in
turn; ``import torch``, which ours and mujoco-warp's processes need, is measured apart and taken off theirs. A peer that
is not installed, or cannot run here, is shown as absent. Bars: the picture ≤ 15 s cold and ≤ 3 s warm beyond
``import torch``.

  python benchmarks/startup.py             three warm rounds
  python benchmarks/startup.py --quick     one round, without the cold picture and mujoco-warp
  python benchmarks/startup.py --check     exit 1 and name each bar that falls short
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLD_PICTURE_S, WARM_PICTURE_S = 15.0, 3.0

PROGRAMS = {
    ("step", "headrace"): """
import torch, headrace
env = headrace.make("ant", num_envs=1); env.reset(seed=0); env.step(torch.zeros(1, 8))
""",
    ("step", "gymnasium"): """
import gymnasium
env = gymnasium.make("Ant-v5"); env.reset(seed=0); env.step(env.action_space.sample())
""",
    ("step", "envpool"): """
import envpool, numpy
env = envpool.make_gymnasium("Ant-v4", num_envs=1); env.reset(); env.step(numpy.zeros((1, 8)))
""",
    ("picture", "headrace"): """
import headrace
env = headrace.make("cartpole-camera", num_envs=1); obs, _ = env.reset(seed=0); assert obs["policy"].any()
""",
    ("picture", "gymnasium"): """
import os; os.environ.setdefault("MUJOCO_GL", "egl")
import gymnasium
env = gymnasium.make("InvertedPendulum-v5", render_mode="rgb_array", width=64, height=64)
env.reset(seed=0); assert env.render().any()
""",
    ("picture", "mujoco-warp"): """
import headrace
from headrace.sim import CameraSpec, PoseReader, WarpCamera
task = headrace.make("cartpole", num_envs=1)
task.reset(seed=0)
model = task.sim.model
camera = WarpCamera(model, CameraSpec(name=model.camera(0).name, width=64, height=64))
assert camera.render(PoseReader(model).read(task.sim.field("qpos").numpy())).rgb.any()
""",
}
USES_TORCH = ("headrace", "mujoco-warp")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, without the cold picture; under a minute")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else 3
    short: list[str] = []
    with tempfile.TemporaryDirectory() as cache:
        torch = _measure("import torch", cache, rounds)
        assert torch is not None
        print(f"import torch: {torch:.1f} s, taken off where a process needs it\n")
        print(f"{'':10}{'':14}{'cold':>8}{'warm':>8}")
        for (kind, who), program in PROGRAMS.items():
            if arguments.quick and who == "mujoco-warp":
                continue
            off = torch if who in USES_TORCH else 0.0
            compiles = who in USES_TORCH and not (arguments.quick and kind == "picture")
            # a quick run warms up with the user's own cache
            place = cache if compiles else None
            cold = _measure(program, place, 1) if compiles else None
            warm = _measure(program, place, rounds)
            if warm is None:
                print(f"{kind:10}{who:14}{'absent':>8}")
                continue
            shown = "" if cold is None else f"{cold - off:.1f} s"
            print(f"{kind:10}{who:14}{shown:>8}{f'{warm - off:.1f} s':>8}")
            if (kind, who) == ("picture", "headrace"):
                if cold is not None and cold - off > COLD_PICTURE_S:
                    short.append(f"first picture, cold: expected ≤ {COLD_PICTURE_S:.0f} s, got {cold - off:.1f} s")
                if warm - off > WARM_PICTURE_S:
                    short.append(f"first picture, warm: expected ≤ {WARM_PICTURE_S:.0f} s, got {warm - off:.1f} s")
    for line in short:
        print(f"SHORT  {line}", file=sys.stderr)
    return 1 if short and arguments.check else 0


def _measure(program: str, cache: str | None, rounds: int) -> float | None:
    """Median seconds of processes that run this; None if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    if cache is not None:
        environment |= {"XDG_CACHE_HOME": cache, "WARP_CACHE_PATH": f"{cache}/warp"}
    seconds: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        seconds.append(time.perf_counter() - start)
        if run.returncode:
            return None
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
