"""Files around the package agree with it: version, workflows, Makefile; and the tests run under any shell."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import headrace

ROOT = Path(__file__).resolve().parent.parent
CTRL_C = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(0.2); print('went on')"


def test_the_version_is_written_once_and_what_cannot_read_it_agrees() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/headrace/__init__.py"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == headrace.__version__
    assert re.search(rf"^## {re.escape(headrace.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_installed_metadata_has_the_version_of_the_package() -> None:
    assert metadata.version("headrace") == headrace.__version__


@pytest.mark.parametrize("path", [*sorted((ROOT / ".github/workflows").glob("*.yml")), ROOT / ".ci/run"])
def test_workflows_run_make_targets_that_exist_and_nothing_else(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    if path.suffix == ".yml":
        jobs = yaml.safe_load(path.read_text())["jobs"]
        commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
        assert all(command.startswith("make ") for command in commands)
    else:
        commands = [line for line in path.read_text().splitlines() if line.startswith("make ")]
    assert commands
    assert {command.split()[1] for command in commands} <= targets


def test_the_workflow_runs_both_supported_versions_of_python() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    supported = [text.rpartition(" ")[2] for text in classifiers if re.search(r":: 3\.\d+$", text)]
    assert jobs["test"]["strategy"]["matrix"]["python"] == supported
    assert {"test", "docs", "wheel"} <= jobs.keys()


def test_make_bench_runs_each_benchmark_once() -> None:
    programs = re.findall(r"benchmarks/(\w+)\.py --quick", (ROOT / "Makefile").read_text())
    assert sorted(programs) == sorted(set(programs))


@pytest.mark.parametrize(("first", "survives"), [("pass", True), ("import conftest", False)])
def test_ctrl_c_reaches_tests_that_were_started_in_the_background(first: str, survives: bool) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"{first}\n{CTRL_C}"],
        cwd=ROOT / "tests",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as a shell does for "command &"
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.stdout.strip() == "went on") is survives, ran.stderr
    assert ("KeyboardInterrupt" in ran.stderr) is not survives
