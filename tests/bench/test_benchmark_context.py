"""A run leaves a valid bundle with the status that is true, however it ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from headrace.bench import read_bundle
from headrace.bench.benchmark import Benchmark, RunSettings
from headrace.bench.builders import RuntimeBuilder
from headrace.bench.schema import RunConfig, RuntimeBundle
from headrace.errors import ConfigError, LifecycleError, StorageError, UnknownNameError


def settings(**more: object) -> RunSettings:
    config = RunConfig(physics_backend="mujoco", rendering_backend=None)
    return RunSettings(task="cartpole", num_envs=4, seed=3, config=config, **more)  # type: ignore[arg-type]  # passed on as it came


def begun(folder: Path, **more: object) -> Benchmark[RuntimeBuilder]:
    return Benchmark(RuntimeBuilder(), settings(), output=folder, **more)  # type: ignore[arg-type]  # passed on as it came


def _send_self(number: int) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait(5)


def test_a_run_that_ends_is_completed_and_its_file_reads_back_equal(tmp_path: Path) -> None:
    with begun(tmp_path) as run:
        run.builder.steps.begin()
        for _ in range(3):
            run.builder.steps.add(0.5, frames=4)
    assert run.paths == [tmp_path / "runtime.json"]
    bundle = read_bundle(run.paths[0])
    assert bundle == run.bundle
    assert isinstance(bundle, RuntimeBundle)
    assert bundle.run.status == "completed"
    assert bundle.run.status_reason is None
    timing = bundle.runtime.environment_step_timing
    assert timing is not None
    assert timing.environment_step_time_s.samples == [0.5, 0.5, 0.5]
    assert timing.environment_step_fps == 8.0
    assert bundle.runtime.frames == 12


def test_a_run_starts_when_it_is_entered_not_when_it_is_made(tmp_path: Path) -> None:
    first, second = begun(tmp_path / "first"), begun(tmp_path / "second")
    with second:
        pass
    time.sleep(0.01)
    with first:
        pass
    assert first.bundle.run.start_time_utc > second.bundle.run.start_time_utc


def test_an_early_stop_is_completed_with_its_reason(tmp_path: Path) -> None:
    with begun(tmp_path) as run:
        run.complete("good enough")
    assert run.bundle.run.status == "completed"
    assert run.bundle.run.status_reason == "good enough"


def test_a_crash_is_written_with_its_error_and_goes_on_to_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), begun(tmp_path):
        raise ZeroDivisionError("on purpose")
    run = read_bundle(tmp_path / "runtime.json").run
    assert run.status == "crashed"
    assert run.error is not None
    assert run.error.type == "ZeroDivisionError"
    assert "on purpose" in run.error.message
    assert any("raise ZeroDivisionError" in line for line in run.error.traceback)


def test_ctrl_c_is_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), begun(tmp_path):
        _send_self(signal.SIGINT)
    assert read_bundle(tmp_path / "runtime.json").run.status == "interrupted"


def test_sigterm_is_interrupted_and_its_handler_is_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), begun(tmp_path):
        _send_self(signal.SIGTERM)
    run = read_bundle(tmp_path / "runtime.json").run
    assert (run.status, run.status_reason) == ("interrupted", "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_while_the_result_is_written_does_not_cost_it(tmp_path: Path) -> None:
    class Slow(RuntimeBuilder):
        def build(self, origin: object) -> RuntimeBundle:
            if origin["run"].status != "running":  # type: ignore[index]  # the provenance
                os.kill(os.getpid(), signal.SIGINT)
            return super().build(origin)  # type: ignore[arg-type]  # passed on as it came

    with pytest.raises(KeyboardInterrupt), Benchmark(Slow(), settings(), output=tmp_path):
        pass
    assert read_bundle(tmp_path / "runtime.json").run.status == "completed"


def test_a_hangup_is_written_as_an_interruption(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), begun(tmp_path):
        _send_self(signal.SIGHUP)
    run = read_bundle(tmp_path / "runtime.json").run
    assert (run.status, run.status_reason) == ("interrupted", "SIGHUP")


def test_a_run_that_goes_on_says_so_and_holds_its_directory(tmp_path: Path) -> None:
    second = begun(tmp_path)
    with begun(tmp_path):
        assert read_bundle(tmp_path / "runtime.json").run.status == "running"
        with pytest.raises(ConfigError, match="expected a directory without runtime"):
            begun(tmp_path)
        with pytest.raises(LifecycleError, match="is writing here"), second:
            pass
    assert read_bundle(tmp_path / "runtime.json").run.status == "completed"
    with pytest.raises(ConfigError, match="expected a directory without runtime"), second:
        pass


def test_the_mark_of_a_running_run_is_gone_where_no_bundle_was_asked_for(tmp_path: Path) -> None:
    with begun(tmp_path, formatters=("summary",)):
        assert (tmp_path / "runtime.json").exists()
    assert not (tmp_path / "runtime.json").exists()


def test_resources_are_those_of_the_measured_part(tmp_path: Path) -> None:
    with begun(tmp_path) as run:
        time.sleep(0.05)
        run.monitor._samples["ram_gb"] += [99.0]  # of the start-up
        run.builder.steps.begin()
        run.builder.steps.add(0.1, frames=4)
    assert run.bundle.resources.ram_gb.peak < 99.0


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with begun(tmp_path):
        assert any(thread.name == "headrace-monitor" for thread in threading.enumerate())
    assert set(threading.enumerate()) <= before


def test_the_bundle_exists_only_after_the_run(tmp_path: Path) -> None:
    with begun(tmp_path) as run, pytest.raises(LifecycleError, match="after the with block"):
        _ = run.bundle


def test_a_result_is_never_overwritten(tmp_path: Path) -> None:
    with begun(tmp_path):
        pass
    with pytest.raises(ConfigError, match="expected a directory without runtime"):
        begun(tmp_path)


def test_an_output_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--output"):
        begun(tmp_path / "file" / "folder")


def test_an_unknown_formatter_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'schema'"):
        begun(tmp_path, formatters=("shema",))


def test_the_run_id_names_framework_physics_task_and_seed(tmp_path: Path) -> None:
    with Benchmark(RuntimeBuilder(), settings(framework="skrl"), output=tmp_path) as run:
        pass
    assert run.bundle.run.run_id.startswith("skrl_mujoco_cartpole_2")
    assert run.bundle.run.run_id.endswith("_seed3")


def test_missing_is_null(tmp_path: Path) -> None:
    with begun(tmp_path) as run:
        pass
    bundle = run.bundle
    assert isinstance(bundle, RuntimeBundle)
    assert bundle.runtime.environment_step_timing is None
    assert bundle.runtime.total_fps is None
    assert bundle.runtime.startup_time_s.env_creation is None
    assert bundle.resources.gpu_util_pct is None
