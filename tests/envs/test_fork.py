"""Environments and forks: what works in a child, what says that it cannot, and what a closed one leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os, sys, threading, traceback
import headrace, torch
torch.set_num_threads(1)

def play(env, steps=5):
    random = torch.Generator().manual_seed(1)
    total = 0.0
    for _ in range(steps):
        actions = torch.rand((env.num_envs, *env.single_action_space.shape), generator=random) * 2 - 1
        step = env.step(actions)
        total += float(step.reward.sum() + step.obs["policy"].sum())
    return total.hex()

def in_child(function):
    "What the function prints and returns in a forked child."
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            print(function(), flush=True)
        except headrace.errors.HeadraceError as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def run(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM + program],
        capture_output=True,
        text=True,
        env={**os.environ, "HEADRACE_NUM_THREADS": "2"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def test_stepping_in_a_forked_child_says_what_to_do_and_the_parent_goes_on() -> None:
    child, parent, alone = run("""
env = headrace.make("ant", num_envs=8, seed=3, threads=2)
env.reset(); env.step(torch.zeros(8, 8))
def attempt():
    global env
    try:
        play(env)
    finally:
        env.close()
        env = None  # freeing it must not wait for threads that are not there
in_child(attempt)
print(play(env))
env = headrace.make("ant", num_envs=8, seed=3, threads=1)
env.reset(); env.step(torch.zeros(8, 8))
print(play(env))
""")
    assert child.startswith("LifecycleError simulation: this process was forked after the simulation was made")
    assert "make the environment in the child, pass threads=1 to make(), or start the process with 'spawn'" in child
    assert parent == alone


def test_an_environment_with_one_thread_goes_on_in_a_forked_child_bit_for_bit() -> None:
    child, parent = run("""
env = headrace.make("ant", num_envs=8, seed=3, threads=1)
env.reset(); play(env)
in_child(lambda: play(env))
print(play(env))
""")
    assert child == parent


def test_an_environment_made_in_a_forked_child_works_after_the_parent_used_one() -> None:
    parent, child = run("""
def fresh():
    with_threads = headrace.make("ant", num_envs=8, seed=3, threads=2)
    with_threads.reset()
    return play(with_threads)
print(fresh())
in_child(fresh)
""")
    assert child == parent


def test_a_closed_environment_leaves_no_thread_behind() -> None:
    before, during, after = run("""
tasks = lambda: len(os.listdir("/proc/self/task"))
headrace.make("cartpole-camera", num_envs=1, threads=1).close()  # numba and torch start what they start
print(tasks())
env = headrace.make("cartpole-camera", num_envs=32, threads=2)
env.reset(); play_steps = [env.step(torch.zeros(32, 1)) for _ in range(3)]
print(tasks())
env.close(); del env, play_steps
print(tasks())
""")
    assert int(during) > int(before)
    assert int(after) == int(before)


def test_workers_of_a_torch_data_loader_make_and_step_environments_after_the_parent_did() -> None:
    parent, *workers, again = run("""
def episodes(index):
    states = headrace.make("ant", num_envs=8, seed=3, threads=2)
    images = headrace.make("cartpole-camera", num_envs=8, seed=3, threads=2, overrides={"normalize": True})
    states.reset(), images.reset()
    played = play(states) + play(images)
    states.close(), images.close()
    return played

class Episodes(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return episodes(index)

print(episodes(0))
for played in torch.utils.data.DataLoader(Episodes(), num_workers=2, batch_size=None, multiprocessing_context="fork"):
    print(played)
print(episodes(0))
""")
    assert len(workers) == 2
    assert {parent, *workers, again} == {parent}
