"""The live page, over real HTTP."""

from __future__ import annotations

import io
import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace._cli import main
from headrace._cli.view_page import Screen, png, serve


def test_pictures_are_encoded_without_loss() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (7, 5, 3)).astype(np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(picture)))), picture)


@pytest.fixture
def page() -> object:
    screen = Screen("ant <b>", 3)
    server = serve(screen, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield screen, f"http://127.0.0.1:{server.server_address[1]}"
    screen.close()
    server.shutdown()
    server.server_close()
    thread.join()


def read(url: str, method: str = "GET") -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5) as answer:
        return answer.read()


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


def test_a_taken_port_and_a_missing_display_are_refused_before_anything_starts(
    page: tuple[Screen, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = page[1].rpartition(":")[2]
    assert main(["view", "cartpole", "--port", port]) == 2
    assert "try --port 0" in capsys.readouterr().err
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert main(["view", "cartpole", "--window"]) == 2
    assert "expected a display" in capsys.readouterr().err
    assert main(["view", "cartpole", "--port", "70000"]) == 2
