"""The live page in a real browser: pictures move, a click suspends, and the end is told."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headrace.viewing.live import Screen, serve

pytestmark = pytest.mark.system

_START = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"


def test_tiles_move_and_a_click_suspends_one(browser) -> None:
    command = [sys.executable, "-u", "-c", _START, "view", "cartpole", "--num-envs", "4", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view:
        try:
            url = re.search(r"http://\S+", view.stdout.readline())[0]
            page = browser.new_context(
                viewport={"width": 375, "height": 700}, color_scheme="dark", bypass_csp=True
            ).new_page()
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


def test_the_page_pauses_makes_a_single_step_and_turns_the_free_camera(browser) -> None:
    command = [*(sys.executable, "-u", "-c", _START, "view", "cartpole"), "--camera", "free", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view:
        try:
            page = browser.new_context(viewport={"width": 800, "height": 900}, bypass_csp=True).new_page()
            page.goto(re.search(r"http://\S+", view.stdout.readline())[0], wait_until="domcontentloaded")
            page.wait_for_selector("#orbit:not([hidden])")
            page.click("#pause")
            page.wait_for_selector("#pause[aria-pressed=true]")

            def count_steps() -> int:
                page.wait_for_timeout(1100)  # the line is read twice a second
                return int(page.inner_text("#state").split()[1].rstrip(","))

            before = count_steps()
            page.click("#step")
            assert count_steps() == before + 1
            still = page.locator("#tiles").screenshot()
            box = page.locator("#tiles").bounding_box()
            page.mouse.move(box["x"] + 50, box["y"] + 50)
            page.mouse.down()
            page.mouse.move(box["x"] + 150, box["y"] + 90, steps=4)
            page.mouse.up()
            page.wait_for_timeout(500)
            turned = page.locator("#tiles").screenshot()
            assert turned != still
            assert page.locator("#tiles button[aria-pressed=true]").count() == 0, "a drag suspends nothing"
            page.mouse.wheel(0, -400)
            page.wait_for_timeout(500)
            assert page.locator("#tiles").screenshot() != turned
            assert count_steps() == before + 1
        finally:
            view.terminate()


def test_a_page_of_another_site_can_neither_suspend_nor_look(browser) -> None:
    screen = Screen("ant", 3)
    view = serve(screen, 0)

    class Evil(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>evil</title>")

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    evil = ThreadingHTTPServer(("127.0.0.1", 0), Evil)
    for server in (view, evil):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = browser.new_page()
        # even with the secret, which it cannot know
        page.goto(f"http://localhost:{evil.server_port}/")
        outcome = page.evaluate(
            """async url => {
              const tried = [];
              for (const mode of ["cors", "no-cors"])
                tried.push(await fetch(url + "click/1", {method: "POST", mode}).then(r => r.type, () => "failed"));
              tried.push(await fetch(url + "state").then(r => r.status, () => "failed"));
              const form = Object.assign(document.createElement("form"), {method: "post", action: url + "click/2"});
              form.target = "elsewhere";
              document.body.append(form);
              document.body.append(Object.assign(document.createElement("iframe"), {name: "elsewhere"}));
              form.submit();
              tried.push(await new Promise(done => {
                const image = new Image();
                image.onload = () => done("shown");
                image.onerror = () => done("failed");
                image.src = url + "stream";
                setTimeout(() => done("waiting"), 2000);
              }));
              return tried;
            }""",
            view.url,
        )
        assert outcome == ["failed"] * 4
        assert screen.take_clicks() == []
        page = browser.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(view.url, wait_until="domcontentloaded")
        page.get_by_role("button", name="environment 1").click()
        deadline = time.monotonic() + 10
        while not (clicked := screen.take_clicks()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert clicked == [1], "the page's own click must come through"
        page.locator("#state", has_text="steps per second").wait_for()
        assert said == [], "the page breaks its own content security policy"
    finally:
        screen.close()
        for server in (view, evil):
            server.shutdown()
            server.server_close()
