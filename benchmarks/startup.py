"""Waiting: seconds from the start of a process to the first step and to the first picture, cold and warm.

  step     the first ``ant`` step of one environment
             gymnasium      Ant-v5
             envpool        Ant-v5
  picture  the first 64 × 64 picture of a cart with a pole
             headrace       ``cartpole-camera``
             gymnasium      InvertedPendulum-v5, render_mode="rgb_array" (needs EGL)
             mujoco-warp    its camera over the model of ``cartpole-camera`` (compiles kernels, too)

Cold is an empty cache of compiled kernels, warm is the next process. Every contestant is a process of its own, in
turn; ``import torch``, which only ours needs, is measured apart and taken off. Bars: the picture ≤ 15 s cold and ≤ 3 s
warm beyond ``import torch``. A peer that is not installed (``make bench-setup``) or cannot run here is shown as absent
and fails ``--check``.

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

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from interleaved import PeerMissingError, python_of

ROOT = Path(__file__).resolve().parent.parent
COLD_PICTURE_S, WARM_PICTURE_S = 15.0, 3.0

SCENE = ROOT / "src" / "headrace" / "envs" / "tasks" / "assets" / "cartpole.xml"

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
env = envpool.make_gymnasium("Ant-v5", num_envs=1); env.reset(); env.step(numpy.zeros((1, 8)))
""",
    ("picture", "headrace"): """
import headrace
overrides = {"pixels": 64, "frame_stack": 1}
env = headrace.make("cartpole-camera", num_envs=1, overrides=overrides)
obs, _ = env.reset(seed=0); assert obs["policy"].any()
""",
    ("picture", "gymnasium"): """
import os; os.environ.setdefault("MUJOCO_GL", "egl")
import gymnasium
env = gymnasium.make("InvertedPendulum-v5", render_mode="rgb_array", width=64, height=64)
env.reset(seed=0); assert env.render().any()
""",
    ("picture", "mujoco-warp"): f"""
import mujoco, mujoco_warp as mjw, warp
warp.config.quiet = True
model = mujoco.MjModel.from_xml_path({str(SCENE)!r})
data = mujoco.MjData(model); mujoco.mj_forward(model, data)
m, d = mjw.put_model(model), mjw.put_data(model, data, nworld=1)
context = mjw.create_render_context(model, nworld=1, cam_res=(64, 64), render_rgb=True, render_depth=False,
    render_seg=False, cam_active=[True])
mjw.kinematics(m, d); mjw.com_pos(m, d); mjw.camlight(m, d); mjw.refit_bvh(m, d, context); mjw.render(m, d, context)
assert context.rgb_data.numpy().any()
""",
}
PYTHONS = {"envpool": ".venv-envpool", "mujoco-warp": ".venv-bench-sim"}
COMPILES = ("headrace", "mujoco-warp")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, without the cold picture; under a minute")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else 3
    short: list[str] = []
    with tempfile.TemporaryDirectory() as cache:
        torch = _measure("import torch", sys.executable, cache, rounds)
        print(f"import torch: {torch:.1f} s, taken off where a process needs it\n")
        print(f"{'':10}{'':14}{'cold':>8}{'warm':>8}")
        for (kind, who), program in PROGRAMS.items():
            if arguments.quick and who == "mujoco-warp":
                continue
            python = str(python_of(PYTHONS[who])) if who in PYTHONS else sys.executable
            off = torch if who == "headrace" else 0.0
            compiles = who in COMPILES and not (arguments.quick and kind == "picture")
            # a quick run warms up with the user's own cache
            place = cache if compiles else None
            try:
                cold = _measure(program, python, place, 1) - off if compiles else None
                warm = _measure(program, python, place, rounds) - off
            except PeerMissingError as error:
                print(f"{kind:10}{who:14}{'absent':>8}")
                short.append(f"{kind}, {who}: absent ({error})")
                continue
            print(f"{kind:10}{who:14}{'' if cold is None else f'{cold:.1f} s':>8}{f'{warm:.1f} s':>8}", flush=True)
            if (kind, who) == ("picture", "headrace"):
                if cold is not None and cold > COLD_PICTURE_S:
                    short.append(f"first picture, cold: expected ≤ {COLD_PICTURE_S:.0f} s, got {cold:.1f} s")
                if warm > WARM_PICTURE_S:
                    short.append(f"first picture, warm: expected ≤ {WARM_PICTURE_S:.0f} s, got {warm:.1f} s")
    for line in short:
        print(f"SHORT  {line}", file=sys.stderr)
    return 1 if short and arguments.check else 0


def _measure(program: str, python: str, cache: str | None, rounds: int) -> float:
    """Median seconds of processes that run this."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    if cache is not None:
        environment |= {"XDG_CACHE_HOME": cache, "WARP_CACHE_PATH": f"{cache}/warp"}
    seconds: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        try:
            run = subprocess.run([python, "-c", program], capture_output=True, text=True, env=environment)
        except FileNotFoundError as error:
            raise PeerMissingError(f"{python} does not exist; run: make bench-setup") from error
        seconds.append(time.perf_counter() - start)
        if run.returncode:
            raise PeerMissingError(run.stderr.strip().splitlines()[-1])
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
