"""What a notebook shows of an environment, a picture and an evaluation."""

from __future__ import annotations

import base64
import io
import re

import gymnasium
import numpy as np
from PIL import Image

import headrace
from headrace.viewing import picture


def shown(html: str) -> np.ndarray:
    (data,) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_an_environment_is_a_picture_its_task_and_its_spaces() -> None:
    env = headrace.make("cartpole", 4)
    before = env._repr_html_()
    assert "<img" not in before, "nothing has begun"
    assert "cartpole" in before
    assert "num_envs=4" in before
    assert "Box(" in before
    env.reset(seed=0)
    assert np.array_equal(shown(env._repr_html_()), env.render())
    env.close()
    assert "<img" not in env._repr_html_()


def test_a_bridged_environment_is_what_it_draws() -> None:
    env = headrace.bridge([lambda: gymnasium.make("CartPole-v1", render_mode="rgb_array")] * 2)
    env.reset()
    assert np.array_equal(shown(env._repr_html_()), env.render())
    env.close()


def test_a_picture_is_its_image_for_people() -> None:
    found = picture("cartpole", kind="depth", width=40, height=30)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(found._repr_png_()))), found.image)


def test_an_evaluation_is_its_table() -> None:
    result = headrace.evaluate("cartpole", episodes=2, num_envs=2, progress=False)
    html = result._repr_html_()
    assert html.startswith('<pre style="font-family: monospace')
    assert "success rate" in html
    assert "2 of 2 episodes" in html


def test_a_notebook_shows_an_evaluation_once_and_its_progress_without_ipywidgets(monkeypatch, capsys) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("headrace._progress._LINE_S", 0.0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = headrace.evaluate("cartpole", lambda obs: 0 * obs["policy"][:, :1], episodes=2, num_envs=2)
    assert re.search(r"env-steps/s.*: \d of 2", capsys.readouterr().err)
    assert "success rate" in result._repr_html_()
    assert capsys.readouterr() == ("", "")
