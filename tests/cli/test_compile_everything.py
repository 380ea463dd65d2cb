"""``headrace doctor --compile``: afterwards nothing that tasks, images, replay and learning do is left to compile."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import gc, torch
torch.set_num_threads(1)
from numba.core.dispatcher import Dispatcher
from headrace.cli.compiling import compile_everything
import headrace

def compiled():
    "Every kernel of headrace that can be called from Python, in every form in which it was loaded."
    found = set()
    for thing in gc.get_objects():
        if isinstance(thing, Dispatcher) and thing.py_func.__module__.startswith("headrace."):
            found |= {f"{thing.py_func.__module__}.{thing.py_func.__name__}{s}" for s in thing.nopython_signatures}
    return found

said = compile_everything()
assert "kernels compiled in" in said and "kept in" in said, said
before = compiled()
assert len(before) > 60, len(before)

for name in headrace.task_names():
    for settings in ({}, {"autoreset": "disabled"}, {"final_obs": False}):
        env = headrace.make(name, 9, overrides={"episode_length": 4}, **settings)
        env.reset(seed=1)
        actions = torch.from_numpy(env.action_space.sample())
        for step in range(7):
            ids = torch.arange(0, 9, 2) if step == 2 and "autoreset" not in settings else torch.arange(0)
            env.suspend(ids)
            ended = env.step(actions)
            env.resume(ids)
            done = ended.terminated | ended.truncated
            if settings.get("autoreset") and bool(done.any()):
                env.reset(options={"reset_mask": done})
        env.observe()
        env.close()
for settings in ({"normalize": True}, {"layout": "channels_first"}, {"color": "gray", "normalize": True}):
    settings |= {"episode_length": 3, "pixels": 12, "frame_stack": 3}
    env = headrace.make("cartpole-camera", 5, overrides=settings)
    env.reset()
    for step in range(5):
        env.step(torch.zeros(5, 1), observe=torch.arange(5) % 2 == step % 2)
    env.observe([1, 3])
    env.close()
print("\\n".join(sorted(compiled() - before)))
"""


def test_after_compiling_everything_nothing_is_left_to_compile() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "HEADRACE_NUM_THREADS": "2"},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "", f"compiled at first use, not by doctor --compile: {done.stdout}"
