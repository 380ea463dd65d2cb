"""The forms of a result: each holds the numbers of the bundle."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from examples import EXAMPLES, origin, runtime_bundle, startup_bundle

from headrace.bench.builders import TrainingBuilder
from headrace.bench.figures import (
    FORMATTERS,
    check_formatters,
    isaaclab_fields,
    output_path,
    summary_text,
    write_formats,
)
from headrace.errors import StorageError, UnknownNameError
from headrace.files import write_whole


@pytest.mark.parametrize("kind", EXAMPLES)
def test_all_forms_of_all_kinds_are_written_beside_each_other(kind: str, tmp_path: Path) -> None:
    paths = write_formats(EXAMPLES[kind](), list(FORMATTERS), tmp_path)
    assert paths == [output_path(name, kind, tmp_path) for name in FORMATTERS]  # type: ignore[arg-type]  # kind comes from a parameter, as text
    assert sorted(tmp_path.iterdir()) == sorted(paths), "nothing temporary is left"
    assert paths[0] == tmp_path / f"{kind}.json"


def test_a_training_without_an_ended_episode_has_no_curves_in_isaac_labs_forms() -> None:
    builder = TrainingBuilder(clock=itertools.count(0.0, 2.0).__next__)
    builder.begin()
    for _ in range(3):
        builder.iteration(frames=64, collection_s=1.0, learning_s=0.5)
    run = builder.build(origin("training"))
    fields = isaaclab_fields(run)
    assert fields["learning"] == {"ema_alpha": 0.1, "reward": None, "ep_length": None, "success_rate": None}
    runtime = fields["runtime"]
    assert (runtime["iterations_completed"], runtime["total_wall_time_s"]) == (2, 6.0), "without the first of three"


def test_a_form_may_be_named_by_module_and_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_forms.py").write_text("def seed_only(bundle):\n    return str(bundle.run.seed)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = check_formatters(["my_forms:seed_only"])
    (path,) = write_formats(runtime_bundle(), names, tmp_path)
    assert (path.name, path.read_text()) == ("runtime_seed_only.txt", "0")
    with pytest.raises(UnknownNameError, match="seed_only"):
        check_formatters(["my_forms:sed_only"])


def test_the_summary_says_what_matters() -> None:
    text = summary_text(runtime_bundle(status="crashed", status_reason="ValueError: boom"))
    assert "runtime: cartpole, 4 environments, seed 0" in text
    assert "crashed (ValueError: boom)" in text
    assert "50 steps, steady" in text
    assert "no pynvml" in text
    assert "torch:<module>" in summary_text(startup_bundle())


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "runtime.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StorageError, match="could not be written"):
        write_whole(path / "below" / "a file", "x")
