"""The live page, over real HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import io
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import headrace
from headrace.cli import main
from headrace.envs.viewer import Viewer, png
from headrace.sim.camera.camera import FreeView
from headrace.viewing.live import Screen, _drawing, serve


def test_pictures_are_encoded_without_loss() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (7, 5, 3)).astype(np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(picture)))), picture)


@pytest.fixture
def page() -> object:
    screen = Screen("ant <b>", 3)
    server = serve(screen, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield screen, server.url.removesuffix("/")
    screen.close()
    server.shutdown()
    server.server_close()
    thread.join()


def read(url: str, method: str = "GET") -> bytes:
    origin = {"Origin": "http://" + url.split("/")[2]} if method == "POST" else {}
    with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=origin), timeout=5) as answer:
        return answer.read()


def ask(url: str, method: str, path: str | None = None, **headers: str) -> int:
    """The status that a request gets whose headers, Host too, are what the caller says."""
    _, _, host, own = url.split("/", 3)
    connection = http.client.HTTPConnection(host, timeout=5)
    connection.putrequest(method, f"/{own}{path}" if path is not None else "/", skip_host=True)
    for name, value in {"Host": host, **headers}.items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_hostile_request_changes_nothing_and_shows_nothing(page: tuple[Screen, str]) -> None:
    screen, url = page
    host = url.split("/")[2]
    own = f"http://{host}"
    refused = [
        ask(url, "POST", "/click/1"),  # no page sends it without an Origin
        ask(url, "POST", "/click/1", Origin="https://evil.example"),
        ask(url, "POST", "/click/1", Origin="null"),
        ask(url, "POST", "/click/1", Origin=f"https://{host}"),
        ask(url, "POST", "/click/1", Origin=f"{own}.evil.example"),
        # a name of the attacker's that leads to this machine
        ask(url, "POST", "/click/1", Host="evil.example", Origin="http://evil.example"),
        ask(url, "GET", "/", Host="evil.example"),
        ask(url, "GET", "/state", Host=f"evil.example:{host.split(':')[1]}"),
        ask(url, "GET", "/state", Host=""),
        ask(url, "GET", "/stream", Host="127.0.0.1"),
        # without the secret
        ask(url, "GET"),
        ask(own + "/", "POST", "click/1", Origin=own),
        ask(own + "/", "GET", "state"),
        ask(own + "/", "GET", "stream"),
        ask(own + "/", "GET", "%2e%2e/state"),
    ]
    assert refused == [403] * len(refused)
    assert screen.take_clicks() == []
    assert not screen.watched


@pytest.mark.parametrize("number", ["3", "-1", "²", "٣", "9" * 400, "1e0", "0x1", "", "1/2", "1?x", "../1"])
def test_an_id_that_is_none_is_refused(page: tuple[Screen, str], number: str) -> None:
    screen, url = page
    path = "/click/" + urllib.parse.quote(number, safe="/?")
    assert ask(url, "POST", path, Origin="http://" + url.split("/")[2]) == 404
    assert screen.take_clicks() == []


def test_a_flood_of_clicks_takes_no_memory(page: tuple[Screen, str]) -> None:
    screen, _ = page
    for number in range(10_001):
        assert screen.control("click", [number % 3])
    assert len(screen.take_clicks()) <= 3


def test_viewers_are_bounded(page: tuple[Screen, str]) -> None:
    screen, url = page
    with contextlib.ExitStack() as viewers:
        for _ in range(16):
            viewers.enter_context(urllib.request.urlopen(url + "/stream", timeout=5))
        assert ask(url, "GET", "/stream") == 503
    screen.close()


def test_no_other_site_may_frame_or_embed_it(page: tuple[Screen, str]) -> None:
    with urllib.request.urlopen(page[1] + "/", timeout=5) as answer:
        policy, headers = answer.headers["Content-Security-Policy"], answer.headers
    assert "frame-ancestors 'none'" in policy
    assert "default-src 'none'" in policy
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_the_page_has_a_button_for_each_environment_and_escapes_its_title(page: tuple[Screen, str]) -> None:
    text = read(page[1] + "/").decode()
    assert text.count("data-env=") == 3
    assert "ant &lt;b&gt;" in text
    assert "https:" not in text


def test_a_click_comes_back_once(page: tuple[Screen, str]) -> None:
    screen, url = page
    assert read(url + "/click/2", "POST") == b"ok"
    assert screen.take_clicks() == [2]
    assert screen.take_clicks() == []
    with pytest.raises(urllib.error.HTTPError, match="404"):
        read(url + "/click/3", "POST")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        read(url + "/elsewhere")


def test_the_page_pauses_makes_single_steps_slows_down_and_turns_the_free_camera(page: tuple[Screen, str]) -> None:
    screen, url = page
    assert [screen.take_step(), screen.take_step()] == [True, True]
    read(url + "/step", "POST")
    assert [screen.take_step(), screen.take_step()] == [True, False], "one step, then a pause"
    assert json.loads(read(url + "/state"))["paused"]
    read(url + "/pause/0", "POST")
    assert screen.take_step()
    read(url + "/slow/16", "POST")
    assert screen.slow == 16
    own = "http://" + url.split("/")[2]
    assert ask(url, "POST", "/look/10,60,100", Origin=own) == 404, "no free camera is shown"
    screen.gaze = (90, 45, 100)
    read(url + "/look/270,60,50", "POST")
    assert screen.gaze == (270, 60, 50)
    for wrong in ("/look/1,2", "/look/1,200,100", "/look/1,2,4", "/slow/0", "/slow/65", "/pause/2", "/step/1", "/go"):
        assert ask(url, "POST", wrong, Origin=own) == 404, wrong
    assert (screen.gaze, screen.slow, screen.paused) == ((270, 60, 50), 16, False)


def test_a_turned_free_camera_draws_what_one_at_that_place_draws() -> None:
    with closing(headrace.make("cartpole", 2, seed=0)) as env:
        env.reset()
        screen = Screen("cartpole", 2)
        draw, _, close = _drawing(env, "native", "free", screen)
        first = draw()
        turn, rise, zoom = screen.gaze
        screen.gaze = (turn + 40) % 360, rise + 10, 2 * zoom
        turned = draw()
        assert not np.array_equal(first, turned)
        viewer = Viewer(env.sim, camera="free")
        view = FreeView.around(env.sim.model)
        viewer.free = dataclasses.replace(
            view, azimuth=(turn + 40) % 360, elevation=rise + 10 - 90, distance=2 * view.distance
        )
        assert np.array_equal(turned, viewer.pictures())
        viewer.close()
        close()


def test_pictures_stream_while_somebody_looks(page: tuple[Screen, str]) -> None:
    screen, url = page
    assert not screen.watched
    with urllib.request.urlopen(url + "/stream", timeout=5) as stream:
        while not screen.watched:
            time.sleep(0.01)
        screen.show([np.full((4, 4, 3), shade, np.uint8) for shade in (10, 20, 30)], np.array([False, True, False]), 5)
        assert stream.readline() == b"--frame\r\n"
        head = {line.partition(b":")[0]: line.partition(b":")[2].strip() for line in iter(stream.readline, b"\r\n")}
        shown = Image.open(io.BytesIO(stream.read(int(head[b"Content-Length"]))))
    assert shown.size == (10, 10)
    state = json.loads(read(url + "/state"))
    assert (state["steps"], state["suspended"]) == (5, [1])


def test_view_steps_a_task_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    assert main(["view", "cartpole", "--num-envs", "2", "--num-steps", "3", "--port", "0"]) == 0
    assert "http://127.0.0.1:" in capsys.readouterr().out
    assert threading.active_count() == before


def test_a_taken_port_is_refused_before_anything_starts(
    page: tuple[Screen, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = page[1].split("/")[2].partition(":")[2]
    assert main(["view", "cartpole", "--port", port]) == 2
    assert "try --port 0" in capsys.readouterr().err
    assert main(["view", "cartpole", "--port", "70000"]) == 2
