"""The demo, whole, with few episodes."""

from __future__ import annotations

from pathlib import Path

import av
import pytest

from headrace._cli import main
from headrace.bench import read_bundle


def test_the_demo_writes_bundles_a_film_and_a_page_and_says_what_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo"
    assert main(["demo", "--quick", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    for line in ("model calls", "rows inferred", "frames drawn", "bytes per transition"):
        assert line in shown
    assert read_bundle(output / "ant-16" / "runtime.json").run.status == "completed"
    # the demo has imported everything before: a time of 0 would be no measurement
    assert read_bundle(output / "ant-16" / "runtime.json").runtime.startup_time_s.python_imports is None
    assert read_bundle(output / "play-cartpole" / "play.json").reward.mean > 250
    assert "headrace demo" in (output / "report.html").read_text()
    with av.open(str(output / "play" / "cartpole-camera.mp4")) as film:
        assert sum(1 for _ in film.decode(video=0)) > 100


def test_a_second_run_takes_the_next_folder(tmp_path: Path) -> None:
    from headrace._cli.demo import _free_folder

    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert _free_folder(tmp_path / "demo") == tmp_path / "demo-3"
    assert _free_folder(tmp_path / "new") == tmp_path / "new"
