"""The forms of a result: each holds the numbers of the bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from examples import EXAMPLES, runtime_bundle, startup_bundle, training_bundle

from headrace.bench.figures import summary_text
from headrace.bench.formatters import FORMATTERS, checked_formatters, output_path, write_formats
from headrace.bench.formatters._isaaclab import json_text, omniperf_text, osmo_text
from headrace.errors import StorageError, UnknownNameError
from headrace.files import write_whole


@pytest.mark.parametrize("kind", EXAMPLES)
def test_all_forms_of_all_kinds_are_written_beside_each_other(kind: str, tmp_path: Path) -> None:
    paths = write_formats(EXAMPLES[kind](), list(FORMATTERS), tmp_path)
    assert paths == [output_path(name, kind, tmp_path) for name in FORMATTERS]  # type: ignore[arg-type]  # kind comes from a parameter, as text
    assert sorted(tmp_path.iterdir()) == sorted(paths), "nothing temporary is left"
    assert paths[0] == tmp_path / f"{kind}.json"


def test_omniperf_nests_values_under_phases_by_isaac_labs_names() -> None:
    found = json.loads(omniperf_text(runtime_bundle()))
    assert list(found) == ["benchmark_info", "hardware_info", "version_info", "startup", "runtime"]
    assert found["benchmark_info"]["task"] == "cartpole"
    assert found["benchmark_info"]["environment_step_measurement_mode"] == "host_return"
    assert found["hardware_info"]["physical_cores"] == 1
    assert found["startup"] == {
        "Python Imports Time": 2000.0,
        "Task Creation and Start Time": 250.0,
        "Scene Creation Time": 500.0,
        "Simulation Start Time": 125.0,
        "Total Start Time (Launch to Train)": 2875.0,
    }
    runtime = found["runtime"]
    assert runtime["Mean Iteration Time"] == 468.75
    # the loop took 1.25 times the steps: 4 steps of 4 frames in 1.875 s
    assert runtime["Mean Total FPS"] == 16 / 1.875
    assert runtime["Max Total FPS"] == 12.8
    assert runtime["Mean Environment Step Host-Return FPS"] == 16 / 1.5
    assert "Std Iterations per Second" in runtime


def test_a_synchronized_run_is_named_as_isaac_lab_names_it() -> None:
    run = runtime_bundle()
    timing = run.runtime.environment_step_timing.model_copy(update={"measurement_mode": "synchronized"})
    run = run.model_copy(update={"runtime": run.runtime.model_copy(update={"environment_step_timing": timing})})
    runtime = json.loads(omniperf_text(run))["runtime"]
    assert runtime["Mean Synchronized Simulation Time per Environment Step"] == 187.5
    assert runtime["Mean Outside Simulation Time per Environment Step"] == 187.5
    assert runtime["Outside Simulation Step Fraction"] == 0.5
    assert "Serialized Diagnostic Total Wall Time" in runtime


def test_osmo_is_one_flat_object() -> None:
    found = json.loads(osmo_text(training_bundle()))
    assert found["EMA 0.1 Reward"] == pytest.approx(6.4)
    assert found["Max Rewards"] == 10.0
    assert found["mujoco"] == "4.0.0"
    assert found["Mean Iteration Time"] == 2000.0


def test_no_phase_is_lost_in_the_flat_object() -> None:
    made = startup_bundle()
    phase = next(iter(made.phases.values()))
    seconds = {"task_config": 3.5, "first_step": 7.5}
    phases = {name: phase.model_copy(update={"total_time_s": spent}) for name, spent in seconds.items()}
    flat = json.loads(osmo_text(made.model_copy(update={"phases": phases})))
    assert (flat["task_config Wall Clock Time"], flat["first_step Wall Clock Time"]) == (3.5, 7.5)


def test_json_lists_phases_with_measurements() -> None:
    phases = {phase["phase_name"]: phase for phase in json.loads(json_text(runtime_bundle()))}
    measured = {m["name"]: m for m in phases["runtime"]["measurements"]}
    assert measured["headrace_runtime runtime Mean Iteration Time"] == {
        "name": "headrace_runtime runtime Mean Iteration Time", "value": 468.75, "unit": "ms", "type": "single"
    }  # fmt: skip
    metadata = {m["name"]: m["data"] for m in phases["benchmark_info"]["metadata"]}
    assert metadata["headrace_runtime benchmark_info seed"] == 0


def test_a_form_may_be_named_by_module_and_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_forms.py").write_text("def seed_only(bundle):\n    return str(bundle.run.seed)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        names = checked_formatters(["my_forms:seed_only"])
        (path,) = write_formats(runtime_bundle(), names, tmp_path)
        assert path.read_text() == "0"
        with pytest.raises(UnknownNameError, match="seed_only"):
            checked_formatters(["my_forms:sed_only"])
    finally:
        FORMATTERS.pop("seed_only", None)


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
