"""The demo, whole, with few episodes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import av
import pytest

import headrace
from headrace.bench import read_bundle
from headrace.bench import story as demo
from headrace.cli import main
from headrace.envs.tasks import aloha
from headrace.errors import DataError
from headrace.evaluation import Evaluation, PlayCfg


def test_the_demo_tells_its_three_scenes_and_writes_a_page_that_begins_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo"
    assert main(["demo", "--quick", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    for line in ("1 of 3", "2 of 3", "3 of 3", "model calls", "rows inferred", "images drawn", "bytes per transition"):
        assert line in shown
    assert read_bundle(output / "ant-16" / "runtime.json").run.status == "completed"
    # the demo has imported everything before: a time of 0 would be no measurement
    assert read_bundle(output / "ant-16" / "runtime.json").runtime.startup_time_s.python_imports is None
    ours, usual = (Evaluation.load(output / rule / "evaluation.json") for rule in ("greedy", "whole-batch-on-any"))
    assert ours.episodes == usual.episodes  # who is inferred when does not change an episode
    assert 0 < ours.counters.frames_drawn < usual.counters.frames_drawn
    cut = Evaluation.load(output / "cut.jsonl")
    assert len(cut.episodes) > 0
    page = (output / "report.html").read_text()
    sections = re.findall(r'<section id="(\w+)"', page)
    assert sections[:3] == ["story", "evaluations", "runs"]
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


def test_a_table_that_differs_after_the_kill_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = headrace.EnvRecipe("pusher-solid", num_envs=2, seed=1)
    whole = headrace.evaluate(recipe, episodes=2, play=PlayCfg(execute=16), progress=False)
    wrong = replace(whole, episodes=[replace(row, reward=row.reward + 1e-9) for row in whole.episodes])

    def played(recipe: headrace.EnvRecipe, policy: str | None, episodes: int, journal: Path) -> None:
        headrace.evaluate(recipe, policy, episodes=1, play=PlayCfg(execute=16), journal=journal, progress=False)

    monkeypatch.setattr(demo, "_kill_midway", played)
    with pytest.raises(DataError, match="differs from the one that was not cut"):
        demo.cut_and_merge(recipe, None, 2, wrong, tmp_path)


def test_a_second_run_takes_the_next_folder(tmp_path: Path) -> None:
    from headrace.cli.demo import _free_folder

    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert _free_folder(tmp_path / "demo") == tmp_path / "demo-3"
    assert _free_folder(tmp_path / "new") == tmp_path / "new"
