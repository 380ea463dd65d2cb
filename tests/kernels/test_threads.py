"""The pool that kernels share: every row once, on any number of threads, for several callers, after a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace._kernels import threads
from headrace._kernels.compiled import kernel, run
from headrace.errors import ConfigError


@kernel()
def _count(start: int, stop: int, out: np.ndarray, value: int) -> None:
    for i in range(start, stop):
        out[i] += value + i


def _workers() -> int:
    return sum(thread.name == "headrace-kernel" for thread in threading.enumerate())


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 64, 1001])
@pytest.mark.parametrize("number", [1, 2, 3, 8])
@pytest.mark.parametrize("min_rows", [1, 5, 10_000])
@pytest.mark.parametrize("pieces", [1, 4])
def test_every_row_is_worked_once(use_threads, rows, number, min_rows, pieces) -> None:
    use_threads(number)
    out = np.zeros(rows, np.int64)
    run(_count, rows, out, 1000, min_rows=min_rows, pieces=pieces)
    assert np.array_equal(out, 1000 + np.arange(rows))


def test_work_below_two_shares_stays_on_the_calling_thread(use_threads) -> None:
    use_threads(4)
    threads.stop_workers()
    seen: list[tuple[int, int, int]] = []
    run(lambda start, stop: seen.append((threading.get_ident(), start, stop)), 19, min_rows=10)
    assert seen == [(threading.get_ident(), 0, 19)]
    assert _workers() == 0


def test_a_call_uses_no_more_threads_than_it_may(use_threads) -> None:
    use_threads(8)
    parts: list[tuple[int, int]] = []
    run(lambda start, stop: parts.append((start, stop)), 90, threads=3)
    assert sorted(parts) == [(0, 30), (30, 60), (60, 90)]


def test_concurrent_callers_get_what_they_would_get_alone(use_threads) -> None:
    use_threads(3)

    def call(value: int) -> bool:
        good = True
        for repeat in range(50):
            out = np.zeros(997, np.int64)
            run(_count, 997, out, value * 1000 + repeat)
            good &= np.array_equal(out, value * 1000 + repeat + np.arange(997))
        return good

    with ThreadPoolExecutor(8) as callers:
        assert all(callers.map(call, range(8)))
    assert _workers() <= 2


def test_a_worker_that_does_not_wake_up_holds_nobody_up(use_threads, monkeypatch) -> None:
    use_threads(2)
    given: list[object] = []

    class Asleep:
        give = given.append

    monkeypatch.setattr(threads._pool, "borrow", lambda count: [Asleep()] * count)
    out = np.zeros(10, np.int64)
    run(_count, 10, out, 0)
    assert np.array_equal(out, np.arange(10))
    # when it wakes up at last, there is nothing to do and nothing held
    assert given[0].work() == 0
    assert given[0]._args == ()


def test_an_error_of_one_part_is_raised_and_the_pool_goes_on(use_threads) -> None:
    use_threads(2)

    def fails(start: int, stop: int) -> None:
        if stop == 10:
            raise ZeroDivisionError(f"rows to {stop}")

    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="rows to 10"):
            run(fails, 10)
    out = np.zeros(10, np.int64)
    run(_count, 10, out, 0)
    assert np.array_equal(out, np.arange(10))


def test_stopping_ends_idle_workers_and_the_next_call_starts_new_ones(use_threads) -> None:
    use_threads(3)
    out = np.zeros(30, np.int64)
    run(_count, 30, out, 0)
    assert _workers() == 2
    threads.stop_workers()
    assert _workers() == 0
    run(_count, 30, out, 0)
    assert np.array_equal(out, 2 * np.arange(30))


@pytest.mark.parametrize("text", ["0", "two", "-1", ""])
def test_a_limit_that_makes_no_sense_is_refused(text, monkeypatch) -> None:
    monkeypatch.setenv(threads.SETTING, text)
    with pytest.raises(ConfigError, match="HEADRACE_NUM_THREADS: expected a whole number of at least 1"):
        threads._initial_limit()
    with pytest.raises(ConfigError, match="expected at least 1, got 0"):
        threads.set_kernel_threads(0)


def _run(program: str, **settings: str) -> str:
    environment = {**os.environ, "HEADRACE_NUM_THREADS": "2", **settings}
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# every kernel that uses threads, with enough rows to use them, as one digest of all results
EVERY_KERNEL = """
import hashlib, os, sys, threading
import numpy as np, torch
torch.set_num_threads(1)

def every_kernel():
    from headrace.replay import row_space
    from headrace.history import CircularBuffer
    from headrace.learning import gae, n_step, td_lambda, vtrace
    from headrace.sim import CameraSpec, NativeCamera
    from headrace.sim.camera.camera import PoseReader
    from headrace.sim.mujoco_api import load_model
    from headrace.types import StackSpec
    from headrace.history import FrameStack, normalize_image
    random = torch.Generator().manual_seed(0)
    out = []
    pictures = torch.randint(0, 256, (48, 64, 64, 3), generator=random, dtype=torch.uint8)
    wide = pictures[:1].repeat(1, 6, 6, 1)
    out += [normalize_image(pictures), normalize_image(wide), normalize_image(pictures[:, ::2])]
    stack = CircularBuffer(4, 48)
    for shift in range(3):
        stack.append(pictures.roll(shift, 0))
    out.append(stack.buffer.clone())
    for normalize in (False, True):
        frames = FrameStack(StackSpec(frames=4, dim=-1), num_envs=48, frame_shape=(64, 64, 3), normalize=normalize)
        frames.append(pictures)
        frames.append(pictures.flip(0))
        out += [frames.observe(), frames.observe(torch.arange(47, 1, -2))]
    numbers = torch.randn((3, 256, 4096), generator=random)
    flags = torch.rand((2, 256, 4096), generator=random) < 0.01
    for estimate in (gae, td_lambda):
        out += estimate(*numbers, *flags, gamma=0.99, lam=0.95)
    out += n_step(*numbers, *flags, gamma=0.99, n=3)
    out += vtrace(*numbers, *flags, numbers[0] / 8, gamma=0.99)
    rows, size = 512, 40_000
    memory = np.random.default_rng(0).integers(0, 256, (rows, size), dtype=np.uint8)
    space = (np.array([memory.ctypes.data], np.int64), 9, size)
    order = np.random.default_rng(1).permutation(rows)
    for outer in (1, 4):
        copy = np.empty(rows * size, np.uint8)
        row_space.gather(space, order[:, None], outer, copy)
        out.append(torch.from_numpy(copy))
    other = memory[order].copy()
    differs = np.zeros(rows, np.bool_)
    source = (other.ctypes.data, size, np.arange(rows))
    row_space.differ(space, order[:, None], 1, source, differs)
    assert not differs.any()
    row_space.scatter(space, order, source)
    assert np.array_equal(memory[order], other)
    model = load_model("<mujoco><worldbody><light pos='0 0 3'/><camera name='eye' pos='0 -2 1' xyaxes='1 0 0 0 .4 1'/>"
        "<geom type='plane' size='2 2 .1'/><body pos='0 0 1'><freejoint/><geom size='.3'/></body></worldbody></mujoco>")
    qpos = np.tile(model.qpos0, (16, 1)); qpos[:, 0] += np.linspace(-1, 1, 16)
    camera = NativeCamera(model, CameraSpec(name="eye", width=64, height=64))
    out.append(torch.from_numpy(camera.render(PoseReader(model).read(qpos)).rgb))
    digest = hashlib.sha256()
    for tensor in out:
        digest.update(tensor.contiguous().numpy())
    return digest.hexdigest()
"""


@pytest.fixture(scope="module")
def expected() -> str:
    return _run(EVERY_KERNEL + "print(every_kernel())", HEADRACE_NUM_THREADS="1")


@pytest.mark.parametrize("number", [2, 3, 7])
def test_no_kernel_depends_on_the_number_of_threads(expected, number) -> None:
    workers = "; print(sum(t.name == 'headrace-kernel' for t in threading.enumerate()))"
    assert _run(EVERY_KERNEL + "print(every_kernel())" + workers, HEADRACE_NUM_THREADS=str(number)).split() == [
        expected,
        str(number - 1),
    ]


def test_several_threads_may_use_every_kernel_at_once(expected) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as callers:
    print(*{future.result() for future in [callers.submit(every_kernel) for _ in range(4)]})
"""
    assert _run(EVERY_KERNEL + program) == expected


def test_a_forked_child_can_use_every_kernel_after_its_parent_did_and_the_parent_goes_on(expected) -> None:
    program = """
import multiprocessing
print(every_kernel(), flush=True)
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(*pool.starmap(every_kernel, [(), ()]))
print(every_kernel())
"""
    assert _run(EVERY_KERNEL + program).split() == [expected] * 4


def test_workers_of_a_torch_data_loader_can_use_every_kernel(expected) -> None:
    program = """
class Digests(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return every_kernel()
print(every_kernel())
loader = torch.utils.data.DataLoader(Digests(), num_workers=2, batch_size=None, multiprocessing_context="fork")
print(*loader)
"""
    assert _run(EVERY_KERNEL + program).split() == [expected] * 3
