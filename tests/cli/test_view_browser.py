"""The live page in a real browser: pictures move, a click suspends, and the end is told."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.system

_START = "import sys; from headrace._cli import main; sys.exit(main(sys.argv[1:]))"


def test_tiles_move_and_a_click_suspends_one(browser) -> None:
    command = [sys.executable, "-u", "-c", _START, "view", "cartpole", "--num-envs", "4", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view:
        try:
            url = re.search(r"http://\S+", view.stdout.readline())[0]
            page = browser.new_context(viewport={"width": 375, "height": 700}, color_scheme="dark").new_page()
            said = []
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.goto(url, wait_until="domcontentloaded")
            page.wait_for_function("document.getElementById('state').textContent.startsWith('step ')")
            first = page.locator("#tiles").screenshot()
            page.wait_for_timeout(500)
            assert page.locator("#tiles").screenshot() != first, "the pictures stand still"
            tile = page.get_by_role("button", name="environment 2")
            tile.click()
            page.wait_for_selector("button[data-env='2'][aria-pressed=true]")
            assert tile.inner_text() == "suspended"
            assert page.evaluate("document.documentElement.scrollWidth") <= 375
            assert said == []
        finally:
            view.terminate()
        page.wait_for_function("document.getElementById('state').textContent.includes('has ended')")
