"""The benchmark commands as their user sees them, in real processes where that matters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import psutil
import pytest

from headrace.bench import RuntimeBundle, StartupBundle, read_bundle
from headrace.cli import main

QUICK = ("--num-envs", "4", "--num-steps", "30", "--warmup-steps", "10")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from headrace.cli import main; sys.exit(main())", *arguments]


def test_runtime_writes_a_bundle_and_every_other_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forms = ("schema", "json", "omniperf", "osmo", "summary")
    flags = [word for form in forms for word in ("--formatter", form)]
    assert main(["runtime", "cartpole", *QUICK, "--seed", "3", "--output", str(tmp_path / "out"), *flags]) == 0
    shown = capsys.readouterr().out
    assert "runtime: cartpole, 4 environments, seed 3" in shown
    assert len(list((tmp_path / "out").iterdir())) == 5
    bundle = read_bundle(tmp_path / "out" / "runtime.json")
    assert isinstance(bundle, RuntimeBundle)
    assert bundle.run.status == "completed"
    published = json.loads((Path(__file__).parents[2] / "docs" / "schema" / "runtime.json").read_text())
    jsonschema.validate(json.loads((tmp_path / "out" / "runtime.json").read_text()), published)
    assert bundle.runtime.frames == 120
    assert bundle.runtime.warmup is not None
    assert bundle.runtime.warmup.steps >= 10
    startup = bundle.runtime.startup_time_s
    assert None not in (startup.python_imports, startup.task_config, startup.env_creation, startup.first_step)


def test_settings_reach_task_and_bundle(tmp_path: Path) -> None:
    preset = tmp_path / "short.yaml"
    preset.write_text("episode_length: 7\ndecimation: 3\n")
    more = ("--preset", str(preset), "--set", "decimation=1", "--actions", "zero", "--timing", "synchronized")
    assert main(["runtime", "cartpole", *QUICK, *more, "--label", "mine", "--output", str(tmp_path / "out")]) == 0
    bundle = read_bundle(tmp_path / "out" / "runtime.json")
    assert isinstance(bundle, RuntimeBundle)
    config = bundle.run.config
    assert config.overrides == {"decimation": 1, "episode_length": 7}
    assert (config.presets, config.actions, bundle.run.label) == (["short"], "zero", "mine")
    assert bundle.runtime.environment_step_timing is not None
    assert bundle.runtime.environment_step_timing.measurement_mode == "synchronized"
    assert bundle.runtime.episodes is not None
    assert bundle.runtime.episodes.completed >= 4 * (30 // 7)


def test_a_gymnasium_environment_is_measured_over_a_bridge(tmp_path: Path) -> None:
    more = ("--set", "max_episode_steps=6", "--output", str(tmp_path / "out"))
    assert main(["runtime", "gym:CartPole-v1", *QUICK, *more]) == 0
    bundle = read_bundle(tmp_path / "out" / "runtime.json")
    assert isinstance(bundle, RuntimeBundle)
    assert bundle.run.config.physics_backend == "gymnasium"
    assert bundle.runtime.episodes is not None
    assert bundle.runtime.episodes.completed >= 16


def test_without_output_the_result_goes_to_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runtime", "cartpole", *QUICK]) == 0
    (path,) = tmp_path.glob("runs/runtime_mujoco_cartpole_*_seed0/runtime.json")
    assert read_bundle(path).run.run_id.startswith("runtime_mujoco_cartpole_")


BAD = [
    (["runtime", "antt"], "did you mean 'ant'"),
    (["runtime", "gym:CartPool-v1"], "CartPole-v1"),
    (["runtime", "ant", "--num-envs", "0"], "--num-envs: expected at least 1, got 0"),
    (["runtime", "ant", "--num-steps", "0"], "--num-steps: expected at least 1"),
    (["runtime", "ant", "--sim", "physx"], "unknown sim 'physx'"),
    (["runtime", "ant", "--formatter", "omnipref"], "did you mean 'omniperf'"),
    (["runtime", "ant", "--output", "a-file/x"], "choose another with --output"),
    (["startup", "ant", "--top-n", "0"], "--top-n: expected at least 1"),
    (["startup", "ant", "--whitelist", "a-file"], "--whitelist a-file: expected"),
    (["compare", "a-file", "a-file"], "a-file: expected the JSON of a benchmark bundle"),
    (["compare", "nowhere", "a-file"], "nothing there"),
    (["compare", "a-file"], "expected A B, or A … vs B …"),
    (["compare", "a", "vs"], "on both sides of 'vs'"),
    (["sweep", "--vary", "num-envs=4", "runtime", "cartpole"], "--vary: expected OPTION=VALUE,VALUE"),
    (["sweep", "--vary", "num-envs=4,8", "runtime"], "expected a task"),
    (["sweep", "--vary", "num-envs=4,8", "runtime", "cartpole", "--seed", "1"], "expected --seed before 'runtime'"),
]


def test_bad_requests_are_refused_before_torch_is_even_imported(tmp_path: Path) -> None:
    """All in one process, which has not imported torch when it ends."""
    (tmp_path / "a-file").write_text("no bundle")
    script = (
        "import json, sys, io, contextlib\n"
        "from headrace.cli import main\n"
        "for arguments, message in json.loads(sys.stdin.read()):\n"
        "    errors = io.StringIO()\n"
        "    with contextlib.redirect_stderr(errors):\n"
        "        code = main(arguments)\n"
        "    told = ' '.join(errors.getvalue().split())\n"
        "    assert code == 2, (arguments, code)\n"
        "    assert ' '.join(message.split()) in told, (arguments, told)\n"
        "    assert 'torch' not in sys.modules and 'mujoco' not in sys.modules, arguments\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(BAD), text=True, capture_output=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_wrong_setting_leaves_no_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runtime", "ant", "--set", "ctrl_cost=1", "--output", str(tmp_path / "out")]) == 2
    assert "did you mean 'ctrl_cost_weight'" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_startup_profiles_every_phase_in_fresh_processes(tmp_path: Path) -> None:
    whitelist = tmp_path / "patterns.yaml"
    whitelist.write_text("env_creation: ['headrace.envs.registry:make']\n")
    more = ("--top-n", "4", "--whitelist", str(whitelist), "--set", "episode_length=9")
    assert main(["startup", "cartpole", "--num-envs", "2", *more, "--output", str(tmp_path / "out")]) == 0
    bundle = read_bundle(tmp_path / "out" / "startup.json")
    assert isinstance(bundle, StartupBundle)
    assert list(bundle.phases) == ["python_imports", "task_config", "env_creation", "first_step"]
    imports = bundle.phases["python_imports"]
    assert len(imports.top_functions) == 4
    assert imports.total_time_s > 0.2, "torch is imported anew, whatever this process has imported"
    assert imports.tree is not None
    assert any("headrace" in node.name for node in imports.tree.children)
    assert [function.name for function in bundle.phases["env_creation"].top_functions] == [
        "headrace.envs.registry:make"
    ]
    assert bundle.unprofiled_s is not None
    assert bundle.unprofiled_s.env_creation is not None


def test_a_pattern_that_matches_nothing_is_an_error_that_keeps_the_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whitelist = tmp_path / "patterns.yaml"
    whitelist.write_text("task_config: ['isaaclab*']\n")
    arguments = ["startup", "gym:CartPole-v1", "--num-envs", "2", "--whitelist", str(whitelist)]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
    assert "'isaaclab*' of phase 'task_config' matches none" in capsys.readouterr().err
    bundle = read_bundle(tmp_path / "out" / "startup.json")
    assert isinstance(bundle, StartupBundle)
    assert bundle.run.status == "crashed"
    assert "python_imports" in bundle.phases


# --- runs that end badly ---


def wait_for(condition: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_an_interrupted_run_leaves_a_valid_bundle(tmp_path: Path, number: int, reason: str) -> None:
    (tmp_path / "marking.py").write_text(
        "from pathlib import Path\n"
        "from headrace.bench import stepping\n"
        "plain = stepping.Stepper.run\n"
        "def run(self, *arguments):\n"
        "    Path('measuring').touch()\n"
        "    plain(self, *arguments)\n"
        "stepping.Stepper.run = run\n"
        "from headrace.cli import main\n"
        "import sys\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = ["runtime", "cartpole", "--num-envs", "2", "--num-steps", "100000000", "--warmup-steps", "1"]
    process = subprocess.Popen(
        [sys.executable, "marking.py", *arguments, "--output", "out"], cwd=tmp_path, stderr=subprocess.PIPE
    )
    try:
        wait_for((tmp_path / "measuring").exists)
        time.sleep(0.2)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    bundle = read_bundle(tmp_path / "out" / "runtime.json")
    assert isinstance(bundle, RuntimeBundle)
    assert (bundle.run.status, bundle.run.status_reason) == ("interrupted", reason)
    assert bundle.runtime.iterations_completed > 0


CRASHING = """
import gymnasium, os

class Crashing(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        Crashing.steps += 1
        if Crashing.steps == 50:
            raise RuntimeError("the gripper fell off")
        return self.observation_space.sample() * 0, 0.0, False, False, {}

gymnasium.register("Crashing-v0", entry_point=Crashing, disable_env_checker=True)
"""


def test_a_crashed_run_leaves_a_valid_bundle_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    arguments = ("runtime", "gym:crashing:Crashing-v0", *QUICK, "--threads", "2", "--output", "out")
    done = subprocess.run(command(*arguments), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the gripper fell off" in done.stderr
    bundle = read_bundle(tmp_path / "out" / "runtime.json")
    assert bundle.run.status == "crashed"
    assert bundle.run.error is not None
    assert bundle.run.error.type == "EnvError"
    assert "the gripper fell off" in "\n".join(bundle.run.error.traceback)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_an_interrupted_startup_leaves_no_worker(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("startup", "cartpole", "--output", "out"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        known = psutil.Process(process.pid)
        wait_for(lambda: any("startup_worker" in " ".join(c.cmdline()) for c in known.children()))
        workers = known.children(recursive=True)
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert not any(worker.is_running() for worker in workers)
    assert read_bundle(tmp_path / "out" / "startup.json").run.status == "interrupted"


# --- comparisons, end to end ---

SLOW = """
import os, time, gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Slow(CartPoleEnv):
    def __init__(self, slow=False, **more):
        super().__init__(**more)
        self.factor = 1.25 if slow else 1.0

    def step(self, action):
        # CPU time, so that neighbours on the machine do not count
        end = time.process_time() + 0.002 * self.factor
        while time.process_time() < end:
            pass
        return super().step(action)

gymnasium.register("Slow-v0", entry_point=Slow, max_episode_steps=50)
"""


def test_a_slowdown_put_in_by_hand_is_found_end_to_end(tmp_path: Path) -> None:
    """Two settings, interleaved runs in processes of their own, and the gate closes; with themselves it stays open."""
    (tmp_path / "slowed.py").write_text(SLOW)
    rest = ("runtime", "gym:slowed:Slow-v0", "--num-envs", "1", "--num-steps", "60", "--warmup-steps", "0")
    flags = ("--vary", "set=slow=False,slow=True", "--repeats", "5", "--metric", "frametime.environment_step_time_s")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command("sweep", *flags, "--output", "sweep", *rest),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 regressed; 5 and 5 runs" in done.stdout
    first, second = tmp_path / "sweep" / "set=slow=False", tmp_path / "sweep" / "set=slow=True"
    bundles = [read_bundle(path) for path in sorted(first.rglob("runtime.json"))]
    assert [bundle.run.seed for bundle in bundles] == [0, 1, 2, 3, 4]
    assert [bundle.run.repetition for bundle in bundles] == [0, 1, 2, 3, 4]
    assert {bundle.run.label for bundle in bundles} == {"set=slow=False"}
    assert len({bundle.run.sweep_id for bundle in bundles}) == 1

    flags = ("--metric", "frametime.*", "--markdown", "table.md", "--junit", "junit.xml", "--allow", "settings")
    done = subprocess.run(
        command("compare", str(first), str(second), *flags), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "**regressed**" in (tmp_path / "table.md").read_text()
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert [suite.get("failures") for suite in root] == ["1"]
    assert main(["compare", str(first), str(first)]) == 0
    assert main(["compare", str(first), str(second)]) == 2, "other settings"
    assert main(["compare", str(second), str(first), "--allow", "settings"]) == 0, "faster is no regression"


def test_a_sweep_stops_at_the_first_request_that_cannot_be_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "--vary", "num-envs=0,4", "--repeats", "2", "runtime", "cartpole"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "the run of 'num-envs=0' cannot be done: error: --num-envs: expected at least 1, got 0" in told


def test_many_files_are_told_apart_by_vs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "c"):
        assert main(["runtime", "cartpole", *QUICK, "--seed", "1", "--output", str(tmp_path / name)]) == 0
    paths = [str(tmp_path / name) for name in ("a", "b", "vs", "c")]
    paths[2] = "vs"
    capsys.readouterr()
    assert main(["compare", *paths]) == 0
    assert "2 and 1 runs" in capsys.readouterr().out
    assert main(["compare", *paths, "--fail-inconclusive"]) == 1
