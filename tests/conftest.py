"""Settings that must stand before any library is imported; a small disk and a browser for the tests that need them."""

import shutil
import signal
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

# a shell without job control starts commands in the background ("make test &") with SIGINT ignored, nohup with SIGHUP,
# and children inherit that: tests that press Ctrl-C would wait forever
for _signal, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _usual)


TIERS = {
    "guides": ("docs/test_examples", "docs/test_own_package", "docs/test_shell_blocks", "docs/test_snippets",
               "docs/test_troubleshooting", "docs/test_tutorials", "test_contributing"),
    "gpu": ("envs/test_cuda", "history/test_frames_on_device", "history/test_no_host_sync", "learning/test_cuda",
            "recording/test_cuda", "sim/test_warp", "test_pretend_cuda",
            "testing/test_gpu_checks"),
}  # fmt: skip
"""Tests with a make target of their own, by the beginning of their path."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of a tier."""
    home = Path(__file__).parent
    for item in items:
        place = item.path.relative_to(home).as_posix() if item.path.is_relative_to(home) else ""
        for tier, beginnings in TIERS.items():
            if place.startswith(beginnings):
                item.add_marker(tier)


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A disk of 64 KiB, where this machine lets us mount one; ``mount -o remount`` changes it."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="session")
def browser() -> Generator[object]:
    """A real one, for tests marked ``system``."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    assert program, "needs a browser: apt-get install chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def use_threads() -> Generator[Callable[[int], None]]:
    """Sets how many threads kernels use, until the end of the test."""
    from headrace import kernel_threads, set_kernel_threads  # after the settings above

    before = kernel_threads()
    yield set_kernel_threads
    set_kernel_threads(before)
