"""The demo, whole, with few episodes."""

from __future__ import annotations

import re
from pathlib import Path

import av
import pytest

from headrace.bench import story as demo
from headrace.cli import main
from headrace.envs.tasks import aloha
from headrace.evaluation import Evaluation


def test_the_demo_tells_its_story_and_writes_a_page_that_begins_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo"
    assert main(["demo", "--quick", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    for line in ("model calls", "rows", "images"):
        assert line in shown
    ours, usual = (Evaluation.load(output / rule / "evaluation.json") for rule in ("greedy", "whole-batch-on-any"))
    assert ours.episodes == usual.episodes  # who is inferred when does not change an episode
    assert 0 < ours.counters.frames_drawn < usual.counters.frames_drawn
    page = (output / "report.html").read_text()
    sections = re.findall(r'<section id="(\w+)"', page)
    assert sections[:3] == ["story", "evaluations", "sides"]
    assert "learning" not in sections  # nothing was trained, so nothing is said about it
    assert f"instead of {usual.counters.rows_inferred:,}" in page
    assert "data:video/mp4;base64," in page
    for name in ("film", "expert"):
        with av.open(str(output / f"{name}.mp4")) as film:
            assert sum(1 for _ in film.decode(video=0)) > 20


def test_without_gym_aloha_the_demo_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(aloha, "find_spec", lambda name: None)
    recipe, policy = demo.choose_task(2, shown.append)
    assert (recipe.source, policy) == ("pusher-solid", None)
    assert "pip install --no-deps gym-aloha" in str(shown)


def test_a_second_run_takes_the_next_folder(tmp_path: Path) -> None:
    from headrace.cli.demo import _free_folder

    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert _free_folder(tmp_path / "demo") == tmp_path / "demo-3"
    assert _free_folder(tmp_path / "new") == tmp_path / "new"
