"""Settings that must stand before any library is imported, and the browser of the tests that need one."""

import os
import shutil
import signal
from collections.abc import Generator

import pytest

# Triton decides at import whether kernels are compiled for a GPU or interpreted on the CPU: here they are interpreted
os.environ["TRITON_INTERPRET"] = "1"

# a shell without job control starts commands in the background ("make test &") with SIGINT ignored, and children
# inherit that: tests that press Ctrl-C would wait forever
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
