"""The forms of a result: each holds the numbers of the bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from examples import EXAMPLES, runtime_bundle, startup_bundle, training_bundle

from headrace.bench import FORMATTERS, summary_text
from headrace.bench.formatters import output_path, write_formats
from headrace.bench.formatters._phases import json_text, omniperf_text, osmo_text
from headrace.errors import StorageError
from headrace.files import write_whole


@pytest.mark.parametrize("kind", EXAMPLES)
def test_all_forms_of_all_kinds_are_written_beside_each_other(kind: str, tmp_path: Path) -> None:
    paths = write_formats(EXAMPLES[kind](), list(FORMATTERS), tmp_path)
    assert paths == [output_path(name, kind, tmp_path) for name in FORMATTERS]  # type: ignore[arg-type]  # kind comes from a parameter, as text
    assert sorted(tmp_path.iterdir()) == sorted(paths), "nothing temporary is left"
    assert paths[0] == tmp_path / f"{kind}.json"


def test_omniperf_nests_values_under_phases() -> None:
    found = json.loads(omniperf_text(runtime_bundle()))
    assert list(found)[:3] == ["benchmark_info", "hardware_info", "version_info"]
    assert found["benchmark_info"]["task"] == "cartpole"
    assert found["frametime"]["environment_step_time_s_mean"] == 0.375
    assert found["frametime"]["environment_step_time_s_n"] == 4
    assert found["startup"]["env_creation"] == 0.5
    # the loop took 1.25 times the steps: 4 steps of 4 frames in 1.875 s
    assert found["runtime"]["throughput_fps"] == 16 / 1.875


def test_osmo_is_flat_per_phase() -> None:
    found = {entry["phase"]: entry for entry in json.loads(osmo_text(training_bundle()))}
    assert found["train"]["reward_final_ema"] == pytest.approx(6.4)
    assert found["version_info"]["numba"] == "0.68.1"
    assert all(not isinstance(value, dict) for entry in found.values() for value in entry.values())


def test_json_lists_phases_with_measurements() -> None:
    phases = {phase["phase_name"]: phase for phase in json.loads(json_text(runtime_bundle()))}
    measured = {m["name"]: m for m in phases["frametime"]["measurements"]}
    step = measured["environment_step_time_s"]
    assert (step["type"], step["mean"], step["n"], step["unit"]) == ("statistical", 0.375, 4, "s")
    assert {m["name"]: m for m in phases["startup"]["measurements"]}["first_step"]["type"] == "single"
    assert {m["name"]: m["data"] for m in phases["benchmark_info"]["metadata"]}["seed"] == 0


def test_the_summary_says_what_matters() -> None:
    text = summary_text(runtime_bundle(status="crashed", status_reason="ValueError: boom"))
    assert "runtime: cartpole, 4 environments, seed 0" in text
    assert "crashed (ValueError: boom)" in text
    assert "50 steps, steady" in text
    assert "no pynvml" in text
    assert "torch:<module>" in summary_text(startup_bundle())


def test_tensorboard_gets_the_curves(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (folder,) = write_formats(training_bundle(), ["tensorboard"], tmp_path)
    found = events.EventAccumulator(str(folder))
    found.Reload()
    rewards = found.Scalars("Train/mean_reward")
    assert [(event.step, event.value) for event in rewards] == [(1, 6.0), (2, 10.0)]
    assert found.Scalars("final/train.success_rate")[0].value == pytest.approx(2 / 3)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "runtime.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StorageError, match="could not be written"):
        write_whole(path / "below" / "a file", "x")
