"""The benchmark commands as their user sees them, in real processes where that matters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from headrace.bench import read_bundle
from headrace.bench.schema import RuntimeBundle, StartupBundle
from headrace.cli import main

QUICK = ("--num-envs", "4", "--num-steps", "30", "--warmup-steps", "10")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from headrace.cli import main; sys.exit(main())", *arguments]


def test_runtime_writes_a_bundle_and_every_other_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forms = ("schema", "isaaclab", "summary")
    flags = [word for form in forms for word in ("--formatter", form)]
    assert main(["runtime", "cartpole", *QUICK, "--seed", "3", "--output", str(tmp_path / "out"), *flags]) == 0
    shown = capsys.readouterr().out
    assert "runtime: cartpole, 4 environments, seed 3" in shown
    assert len(list((tmp_path / "out").iterdir())) == 3
    bundle = read_bundle(tmp_path / "out" / "runtime.json")
    assert isinstance(bundle, RuntimeBundle)
    assert bundle.run.status == "completed"
    published = json.loads((Path(__file__).parents[2] / "docs" / "schema" / "runtime.json").read_text())
    jsonschema.validate(json.loads((tmp_path / "out" / "runtime.json").read_text()), published)
    assert bundle.runtime.frames == 120
    assert bundle.runtime.warmup is not None
    assert bundle.runtime.warmup.steps >= 10
    startup = bundle.runtime.startup_time_s
    assert None not in (startup.task_config, startup.env_creation, startup.first_step)


def test_imports_are_timed_in_a_fresh_process_and_null_in_one_that_has_done_them(tmp_path: Path) -> None:
    run = ["runtime", "cartpole", "--num-envs", "2", "--num-steps", "2", "--warmup-steps", "0", "--output"]
    program = (
        "import sys\nfrom headrace.cli import main\n"
        "sys.exit(main([*sys.argv[1:], 'first']) or main([*sys.argv[1:], 'second']))"
    )
    subprocess.run([sys.executable, "-c", program, *run], cwd=tmp_path, check=True, capture_output=True)
    first, second = (read_bundle(tmp_path / name / "runtime.json") for name in ("first", "second"))
    assert first.runtime.startup_time_s.python_imports > 0.1
    assert second.runtime.startup_time_s.python_imports is None


def test_settings_reach_task_and_bundle(tmp_path: Path) -> None:
    more = ("--set", "episode_length=7", "--set", "decimation=1", "--actions", "zero", "--timing", "synchronized")
    assert main(["runtime", "cartpole", *QUICK, *more, "--label", "mine", "--output", str(tmp_path / "out")]) == 0
    bundle = read_bundle(tmp_path / "out" / "runtime.json")
    assert isinstance(bundle, RuntimeBundle)
    config = bundle.run.config
    assert config.overrides == {"decimation": 1, "episode_length": 7}
    assert (config.actions, bundle.run.label) == ("zero", "mine")
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
    (["runtime", "ant", "--num-steps", "0"], "(--num-steps): expected at least 1"),
    (["runtime", "ant", "--seed", str(2**63)], "seed (--seed): expected a number of 64 bits, got 9223372036854775808"),
    (["runtime", "ant", "--sim", "physx"], "unknown sim 'physx'"),
    (["runtime", "ant", "--formatter", "sumary"], "did you mean 'summary'"),
    (["runtime", "ant", "--output", "a-file/x"], "choose another directory with --output"),
    (["startup", "ant", "--top-n", "0"], "(--top-n): expected at least 1"),
    (["compare", "a-file", "a-file"], "a-file: expected the JSON of a benchmark bundle"),
    (["compare", "nowhere", "a-file"], "nothing there"),
    (["compare", "a-file"], "expected A B, or A … vs B …"),
    (["compare", "a", "vs"], "on both sides of one 'vs'"),
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
    assert not (tmp_path / "out").exists()


def test_startup_profiles_every_phase_in_fresh_processes(tmp_path: Path) -> None:
    more = ("--top-n", "4", "--set", "episode_length=9")
    assert main(["startup", "cartpole", "--num-envs", "2", *more, "--output", str(tmp_path / "out")]) == 0
    bundle = read_bundle(tmp_path / "out" / "startup.json")
    assert isinstance(bundle, StartupBundle)
    assert list(bundle.phases) == ["python_imports", "task_config", "env_creation", "first_step"]
    imports = bundle.phases["python_imports"]
    assert len(imports.top_functions) == 4
    assert imports.total_time_s > 0.2, "torch is imported anew, whatever this process has imported"
    assert any(":" in function.name for function in bundle.phases["env_creation"].top_functions)
    assert bundle.unprofiled_s is not None
    assert bundle.unprofiled_s.env_creation is not None


# --- comparisons, end to end ---

SLOW = """
import time, gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Slow(CartPoleEnv):
    def __init__(self, slow=False, **more):
        super().__init__(**more)
        self.seconds = 0.02 if slow else 0.01

    def step(self, action):
        # sleep, and plenty of it: neighbors on the machine must not decide a test
        time.sleep(self.seconds)
        return super().step(action)

gymnasium.register("Slow-v0", entry_point=Slow, max_episode_steps=50)
"""


SLOWED = ("gym:slowed:Slow-v0", "--num-envs", "1", "--num-steps", "20", "--warmup-steps", "0")
STEP = ("--metric", "frametime.environment_step_time_s")


def test_a_slowdown_put_in_by_hand_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gate closes; it stays open for runs compared with themselves, and for a speed-up."""
    (tmp_path / "slowed.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    fast, slow = (str(tmp_path / name) for name in ("fast", "slow"))
    for seed in range(5):
        for folder, flag in ((fast, False), (slow, True)):
            flags = ("--seed", str(seed), "--set", f"slow={flag}", "--output", f"{folder}/{seed}")
            assert main(["runtime", *SLOWED, *flags]) == 0
    capsys.readouterr()
    more = ("--allow", "settings", "--accept-drift", "--markdown", "table.md")
    assert main(["compare", fast, slow, *STEP, *more]) == 1
    assert "1 regressed; 5 and 5 runs" in capsys.readouterr().out
    assert "**regressed**" in (tmp_path / "table.md").read_text()
    assert main(["compare", fast, fast]) == 0
    assert main(["compare", fast, slow]) == 2, "other settings"
    assert main(["compare", fast, slow, *STEP, "--allow", "settings"]) == 0, "their order was not drawn"
    assert main(["compare", slow, fast, *STEP, *more[:3]]) == 0, "faster is no regression"


def swept(tmp_path: Path, repeats: int, *more: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "slowed.py").write_text(SLOW)
    flags = ("--vary", "set=slow=False,slow=True", "--repeats", str(repeats), *STEP, "--output", "sweep", *more)
    return subprocess.run(
        command("sweep", *flags, "runtime", *SLOWED), cwd=tmp_path, capture_output=True, text=True, check=False
    )


def test_a_sweep_of_one_run_a_side_is_inconclusive(tmp_path: Path) -> None:
    done = swept(tmp_path, 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 inconclusive; 1 and 1 runs" in done.stdout
    runs = [read_bundle(path).run for path in sorted((tmp_path / "sweep").rglob("runtime.json"))]
    assert [run.label for run in runs] == ["set=slow=False", "set=slow=True"]
    assert [(run.seed, run.repetition) for run in runs] == [(0, 0), (0, 0)]
    assert len({(run.sweep_id, run.order_seed) for run in runs}) == 1
    assert runs[0].order_seed is not None
    assert "use at least 8" in done.stdout
    again = swept(tmp_path, 1, "--resume")
    assert again.returncode == 0, again.stderr
    assert len(list((tmp_path / "sweep").rglob("runtime.json"))) == 2, "nothing was left to run"


@pytest.mark.slow
def test_a_sweep_finds_a_slowdown_end_to_end(tmp_path: Path) -> None:
    done = swept(tmp_path, 8)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 regressed; " in done.stdout
    runs = [read_bundle(path).run for path in sorted((tmp_path / "sweep" / "set=slow=True").rglob("runtime.json"))]
    assert [(run.seed, run.repetition) for run in runs] == [(i, i) for i in range(len(runs))]


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
